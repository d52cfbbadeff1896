"""How fast kernels are, against a copy of the same bytes and against XLA."""
