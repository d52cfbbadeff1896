"""Groups: parts of one array that have a tensor scale each."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import blocks, exact, manual


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Which entries of an array's first axis have their tensor scale in common.

    Attributes:
      of: int32 [t], the group of each entry, e of those without; None where each is one
        of its own.
      count: number of groups e.
      axes: mesh axes of the enclosing `jax.shard_map` over which groups are spread.
      used: bool [e], which groups have entries, on any device along these axes; None:
        not known.
    """

    of: jax.Array | None
    count: int = dataclasses.field(metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    used: jax.Array | None = None

    @classmethod
    def of_entries(
        cls, of: jax.Array, count: int, axes: tuple[str, ...] = ()
    ) -> "Groups":
        """Returns groups that know which of them have entries."""
        used = jnp.zeros(count, jnp.int32).at[of].set(1, mode="drop")
        used = lax.pmax(used, axes) if axes else used
        return cls(of, count, axes, used > 0)

    def amax(self, x: jax.Array) -> jax.Array:
        """Returns max |x| of each group of x [t, ...], float32 [e].

        0 of a group without entries, NaN where any element is.
        """
        amax = blocks.amax(x, tuple(range(1, x.ndim))).reshape(-1)
        return manual.pmax(self.collect(amax), self.axes)

    def collect(self, values: jax.Array) -> jax.Array:
        """Returns the largest of the entries here of each group, [e] of [t].

        Of float32 magnitudes, compared as integers: NaN is above all others.
        """
        if self.of is None:
            return values
        zeros = jnp.zeros(self.count, jnp.int32)
        bits = exact.magnitude_bits_of(values)
        return exact.float_of(zeros.at[self.of].max(bits, mode="drop"))

    def spread(self, values: jax.Array, ndim: int) -> jax.Array:
        """Returns the values [e] of the groups at their entries, [t, 1, ...]."""
        if self.of is not None:
            values = values.at[self.of].get(mode="clip")
        return lax.expand_dims(values, tuple(range(1, ndim)))
