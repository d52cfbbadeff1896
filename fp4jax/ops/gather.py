"""Weights that are spread over devices, gathered as codes.

A device quantizes its part of a weight, and the parts come together as codes and
scales: 4.5 bits an element with one-byte scales for 16, 6 with float32 ones, where
bfloat16 takes 16. A weight that is not quantized is cast before it is gathered.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fp4jax.numerics import Quantizer, exact
from fp4jax.ops.operands import Operand
from fp4jax.ops.residuals import PackedOperand, pack_operand, unpack_operand


@dataclasses.dataclass(frozen=True)
class Gather:
    """Where a weight [k, n] lies, and where its products want it.

    Attributes:
      stored: how it is spread over the mesh of the context; whole blocks a device.
      used: how its operands are.
    """

    stored: P
    used: P

    def store(self, x: jax.Array) -> jax.Array:
        """Makes an array lie as the weight is stored."""
        return lax.with_sharding_constraint(x, self.stored)

    def cast(self, w: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns a weight in another dtype, cast where it is stored."""
        w = exact.cast(w, dtype)
        # As bits: XLA moves a conversion of what it gathers to before the gathering.
        bits = lax.bitcast_convert_type(w, jnp.dtype(f"uint{8 * w.dtype.itemsize}"))
        return lax.bitcast_convert_type(self._moved(bits), w.dtype)

    def operand(self, w: Operand, quantizer: Quantizer) -> Operand:
        """Returns a quantized operand, of a weight where it is stored."""
        return unpack_operand(self.packed(pack_operand(w, quantizer)))

    def packed(self, w: PackedOperand) -> PackedOperand:
        """Returns a packed operand, of a weight where it is stored."""
        return dataclasses.replace(
            w, codes=self._moved(w.codes), scales=self._moved(w.scales)
        )

    def _moved(self, x: jax.Array) -> jax.Array:
        """Returns codes of the stored weight as products want them."""
        return lax.with_sharding_constraint(self.store(x), self.used)
