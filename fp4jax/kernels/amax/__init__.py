"""The amax of a rotated array."""
