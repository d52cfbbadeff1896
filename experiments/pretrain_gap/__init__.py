"""How far 4-bit pretraining stays behind BF16, and in which recipes."""
