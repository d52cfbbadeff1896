"""Products of groups of rows, each by the matrix of its group."""

from fp4jax.kernels.grouped_matmul.runs import Runs as Runs
from fp4jax.kernels.grouped_matmul.runs import Sums as Sums
from fp4jax.kernels.grouped_matmul.runs import piece as piece
