"""Square blocks for FP8 tensor cores: their amaxes, and a matrix and its transpose."""
