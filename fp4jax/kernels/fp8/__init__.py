"""Square blocks for FP8 tensor cores: their amaxes, and a matrix and its transpose."""

from fp4jax.kernels.fp8.api import amax as amax
from fp4jax.kernels.fp8.api import encode as encode
from fp4jax.kernels.fp8.api import encoder as encoder
from fp4jax.kernels.fp8.api import supports as supports
