"""What kernels in Triton have in common."""
