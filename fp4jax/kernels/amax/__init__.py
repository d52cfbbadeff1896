"""The amax of a rotated array, by the kernel for its matrix."""
