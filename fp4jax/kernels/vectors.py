"""Vectors that a thread holds, in MLIR."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector


def elements_of(x: ir.Value) -> list[ir.Value]:
    """Returns the elements of a vector."""
    kind: Any = x.type
    return [
        vector.extract(x, dynamic_position=[], static_position=[i])
        for i in range(kind.shape[0])
    ]


def widened(x: ir.Value) -> list[ir.Value]:
    """Returns elements of a vector in float32, of bfloat16 by an instruction each."""
    kind: Any = x.type
    (size,), f32 = kind.shape, ir.F32Type.get()
    if not isinstance(kind.element_type, ir.BF16Type):
        return elements_of(x)
    if size % 2:
        return elements_of(arith.extf(ir.VectorType.get((size,), f32), x))
    i32 = ir.IntegerType.get_signless(32)
    words = utils.bitcast(x, ir.VectorType.get((size // 2,), i32))

    def constant(value: int) -> ir.Value:
        attribute = ir.IntegerAttr.get(i32, value)
        splat = ir.DenseElementsAttr.get_splat(words.type, attribute)
        return arith.constant(words.type, splat)

    halves = (
        arith.shli(words, constant(16)),
        arith.andi(words, constant(-(2**16))),
    )
    floats = ir.VectorType.get((size // 2,), f32)
    pairs = zip(*(elements_of(utils.bitcast(h, floats)) for h in halves), strict=True)
    return [element for pair in pairs for element in pair]
