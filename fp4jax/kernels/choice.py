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
      why_not: what of tiles, features k and n, and a precision the others do not take,
        or None.
      rows: as `fp4jax.ops.grouped_matmul.rows`, without precision.
      weights: as `fp4jax.ops.grouped_matmul.weights`, without precision.
    """

    why_not: Callable[[jax.Array, tuple[int, int], Any], str | None]
    rows: Callable[..., jax.Array]
    weights: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What is chosen, of each kind of kernels.

    Attributes:
      quantize: a backend of `fp4jax.kernels.quantize`, which is taken where it can;
        None: that of the device.
      products: of groups; None: kernels on Hopper GPUs, a scan over tiles elsewhere.
      scaled_matmul: a backend of `fp4jax.kernels.scaled_matmul`, which multiplies by
        packed operands where it can; None: they are decoded to memory.
      exchange: of `fp4jax.kernels.exchange`, which sends tokens to the devices of their
        experts; None: RAGGED along axes of up to 8 GPUs of a process, else DENSE.
    """

    quantize: Any = None
    products: Products | None = None
    scaled_matmul: Any = None
    exchange: Any = None

    def __post_init__(self):
        for name, (method, such) in _METHODS.items():
            value = getattr(self, name)
            is_backend = hasattr(value, method) and not isinstance(value, type)
            if value is not None and not is_backend:
                raise TypeError(
                    f"Kernels: {name} must be a backend of fp4jax.kernels.{name}, such "
                    f"as its {such}, or None, got {name}={value!r}."
                )
        if not isinstance(self.products, Products | None):
            raise TypeError(
                "Kernels: products must be Products, such as HOPPER of fp4jax.kernels."
                f"grouped_matmul, or None, got products={self.products!r}."
            )


# What a backend does, by which it is told from others, and which there are.
_METHODS = {
    "quantize": ("quantize", "MOSAIC or XLA"),
    "scaled_matmul": ("multiply", "MOSAIC or XLA"),
    "exchange": ("exchange", "DENSE or RAGGED"),
}

KERNELS: Any = jax.make_user_context(Kernels())


def chosen() -> Kernels:
    """Returns the choice of the context."""
    found = KERNELS.value
    if not isinstance(found, Kernels):
        raise TypeError(
            f"KERNELS: must be entered with Kernels(...), got KERNELS({found!r})."
        )
    return found
