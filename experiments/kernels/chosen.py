"""The kernels that a command line chooses."""

from typing import Literal

from fp4jax.kernels.choice import Kernels
from fp4jax.kernels.quantize import XLA
from fp4jax.ops.grouped_matmul import RAGGED
from fp4jax.ops.mosaic import HOPPER

Grouped = Literal["default", "hopper", "ragged"]
Quantize = Literal["default", "xla"]


def choice(*, grouped: Grouped = "default", quantize: Quantize = "default") -> Kernels:
    """Returns the kernels of these names.

    Args:
      grouped: what multiplies groups of rows: JAX's kernels for Hopper GPUs,
        `lax.ragged_dot`, or what the library takes by itself.
      quantize: the backend of `fp4jax.kernels.quantize`, or that of the device.
    """
    products = {"default": None, "hopper": HOPPER, "ragged": RAGGED}[grouped]
    return Kernels(quantize=XLA if quantize == "xla" else None, products=products)
