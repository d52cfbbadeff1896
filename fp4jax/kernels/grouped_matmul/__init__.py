"""Products of groups of rows, each by the matrix of its group."""

from fp4jax.kernels.grouped_matmul.backends import HOPPER as HOPPER
from fp4jax.kernels.grouped_matmul.backends import Hopper as Hopper
from fp4jax.kernels.grouped_matmul.backends import of_device as of_device
