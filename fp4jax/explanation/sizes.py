"""The sizes of the products of a traced program, from their equations.

Every primitive that multiplies matrices is one product y = x w, repeated in a batch:

    dot_general, scaled_matmul      m rows of x, k contracted, n columns of w
    ragged_dot_general              a product for each group, whose rows are not known
    conv_general_dilated            m pixels of y, k pixels and channels of a window
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fp4jax.explanation.matmul import Sizes
from fp4jax.ops.dims import DimensionNumbers, Dims


def sizes_of(eqn: Any) -> Sizes | None:
    """Returns (batch, m, k, n) of an equation, or None where it is no product."""
    read = _READERS.get(eqn.primitive.name)
    return None if read is None else read(eqn)


def sizes_of_layer(sizes: Sizes, kernel: int, stack: tuple[int, ...]) -> Sizes:
    """Returns the sizes of one layer, of which n is that of w.

    In a program that maps over a stack, lanes multiply the batch; or n, where all
    layers see one input.

    Args:
      sizes: of the product in the program.
      kernel: number of elements of one layer's w.
      stack: leading axes of the layers.
    """
    batch, m, k, n = sizes
    if batch is None or m is None:
        return sizes
    for lanes in (1, math.prod(stack)):
        for rows, columns in ((m, n), (n, m)):
            if batch * k * columns != lanes * kernel:
                continue
            if batch % lanes == 0:
                return batch // lanes, rows, k, columns
            if columns % lanes == 0:
                return batch, rows, k, columns // lanes
    return sizes


def _shapes(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    return lhs, rhs


def _contraction(eqn: Any, numbers: DimensionNumbers) -> tuple[int, int, int, int]:
    lhs, rhs = _shapes(eqn)
    dims = Dims.of(numbers)
    batch = math.prod(lhs[d] for d in dims.lhs_batch)
    k = math.prod(lhs[d] for d in dims.lhs_contracting)
    m, n = (math.prod(shape) // max(batch * k, 1) for shape in (lhs, rhs))
    return batch, m, k, n


def _dot(eqn: Any) -> Sizes:
    return _contraction(eqn, eqn.params["dimension_numbers"])


def _ragged_dot(eqn: Any) -> Sizes:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    groups = eqn.invars[2].aval.shape[-1]
    batch, m, k, n = _contraction(eqn, numbers.dot_dimension_numbers)
    if not numbers.rhs_group_dimensions:  # the groups divide k, or the batch
        return batch, m, k, n
    return batch * groups, None, k, n // groups


def _scaled_matmul(eqn: Any) -> Sizes:
    (batch, m, k), (_, n, _) = _shapes(eqn)
    return batch, m, k, n


def _convolution(eqn: Any) -> Sizes:
    _, kernel = _shapes(eqn)
    (out,) = (v.aval.shape for v in eqn.outvars)
    channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    m, k = (math.prod(shape) // max(channels, 1) for shape in (out, kernel))
    return groups, m, k, channels // groups


_READERS: Mapping[str, Callable[[Any], Sizes]] = MappingProxyType(
    {
        "dot_general": _dot,
        "ragged_dot_general": _ragged_dot,
        "scaled_matmul_wrapper": _scaled_matmul,
        "conv_general_dilated": _convolution,
    }
)
