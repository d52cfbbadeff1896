"""Fused kernels: each with its reference, its backends, and a choice between them."""
