"""Dimension numbers: any `dot_general` as one canonical matrix product.

    lhs [*batch, *m, k],  rhs [*batch, k, *n]  ->  out [*batch, *m, *n]

Contracting dimensions are flattened row-major into k; m and n stay as they are.
"""

import dataclasses
import math
import operator
from typing import Any

import jax

DimensionNumbers = tuple[tuple[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Dims:
    """Contracting and batch dimensions of the two operands of a `dot_general`.

    Attributes:
      lhs_contracting, rhs_contracting: in matching order.
      lhs_batch, rhs_batch: in matching order.
    """

    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    @classmethod
    def of(cls, dimension_numbers: DimensionNumbers) -> "Dims":
        """Reads the argument of `lax.dot_general`, which has checked it."""
        (lhs_c, rhs_c), (lhs_b, rhs_b) = dimension_numbers
        return cls(
            *(tuple(map(operator.index, d)) for d in (lhs_c, rhs_c, lhs_b, rhs_b))
        )

    def canonical_lhs(self, lhs: jax.Array) -> jax.Array:
        """Transposes and flattens lhs to [*batch, *m, k]."""
        free = _free(lhs.ndim, self.lhs_contracting, self.lhs_batch)
        lhs = lhs.transpose(*self.lhs_batch, *free, *self.lhs_contracting)
        return flatten(lhs, len(self.lhs_batch) + len(free), lhs.ndim)

    def canonical_rhs(self, rhs: jax.Array) -> jax.Array:
        """Transposes and flattens rhs to [*batch, k, *n]."""
        free = _free(rhs.ndim, self.rhs_contracting, self.rhs_batch)
        rhs = rhs.transpose(*self.rhs_batch, *self.rhs_contracting, *free)
        start = len(self.rhs_batch)
        return flatten(rhs, start, start + len(self.rhs_contracting))


def flatten(x: jax.Array, start: int, stop: int) -> jax.Array:
    """Joins the dimensions from `start` to before `stop`, row-major."""
    if stop == start + 1:
        return x
    return x.reshape(*x.shape[:start], math.prod(x.shape[start:stop]), *x.shape[stop:])


def _free(ndim: int, contracting: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    return [d for d in range(ndim) if d not in contracting and d not in batch]
