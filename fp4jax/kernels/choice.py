"""Which kernels compute what is traced.

    with KERNELS(Kernels(quantize=XLA)):
        step(...)

The choice is part of the key of every jit cache.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Products:
    """What multiplies groups of rows in place of a scan over tiles, where it can.

    Attributes:
      supports: whether the others take features k and n, a dtype and a precision.
      rows: as `fp4jax.ops.grouped_matmul.rows`, without precision.
      weights: as `fp4jax.ops.grouped_matmul.weights`, without precision.
    """

    supports: Callable[[tuple[int, int], Any, Any], bool]
    rows: Callable[..., jax.Array]
    weights: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What is chosen, of each kind of kernels.

    Attributes:
      quantize: a backend of `fp4jax.kernels.quantize`, which is taken where it can;
        None: that of the device.
      products: of groups; None: a scan over tiles.
      scaled_matmul: a backend of `fp4jax.kernels.scaled_matmul`, which multiplies by
        packed operands where it can; None: they are decoded to memory.
    """

    quantize: Any = None
    products: Products | None = None
    scaled_matmul: Any = None


KERNELS: Any = jax.make_user_context(Kernels())


def chosen() -> Kernels:
    """Returns the choice of the context."""
    return KERNELS.value
