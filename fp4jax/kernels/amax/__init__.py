"""The amax of a rotated array."""

from fp4jax.kernels.amax.api import tensor_amax as tensor_amax
