"""The kernels that a command line chooses."""

from typing import Literal

from fp4jax.kernels import scaled_matmul
from fp4jax.kernels.choice import Kernels
from fp4jax.kernels.exchange import DENSE
from fp4jax.kernels.grouped_matmul import HOPPER
from fp4jax.kernels.quantize import MOSAIC, TRITON, XLA
from fp4jax.ops.grouped_matmul import RAGGED, SCAN

Grouped = Literal["default", "hopper", "ragged", "scan"]
Quantize = Literal["default", "mosaic", "triton", "xla"]
Packed = Literal["default", "mosaic"]
Exchange = Literal["default", "dense"]


def choice(
    *,
    grouped: Grouped = "default",
    quantize: Quantize = "default",
    packed: Packed = "default",
    exchange: Exchange = "default",
) -> Kernels:
    """Returns the kernels of these names.

    Args:
      grouped: what multiplies groups of rows: kernels for Hopper GPUs,
        `lax.ragged_dot`, a scan over tiles, or what the library takes by itself.
      quantize: the backend of `fp4jax.kernels.quantize`, or that of the device.
      packed: what multiplies by packed operands: the kernel for Hopper GPUs, or what
        the library takes by itself.
      exchange: what sends tokens to experts: all of the room for them, or what the
        library takes by itself.
    """
    of_groups = {"default": None, "hopper": HOPPER, "ragged": RAGGED, "scan": SCAN}
    named = {"default": None, "mosaic": MOSAIC, "triton": TRITON, "xla": XLA}
    return Kernels(
        quantize=named[quantize],
        products=of_groups[grouped],
        scaled_matmul=scaled_matmul.MOSAIC if packed == "mosaic" else None,
        exchange=DENSE if exchange == "dense" else None,
    )
