"""Products of a packed operand."""

from fp4jax.kernels.scaled_matmul.api import Implementation as Implementation
from fp4jax.kernels.scaled_matmul.api import scaled_matmul as scaled_matmul
from fp4jax.kernels.scaled_matmul.backends import INTERPRETED as INTERPRETED
from fp4jax.kernels.scaled_matmul.backends import MOSAIC as MOSAIC
from fp4jax.kernels.scaled_matmul.backends import XLA as XLA
from fp4jax.kernels.scaled_matmul.reference import Side as Side
