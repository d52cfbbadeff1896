"""The three GEMMs of tokens that have the weight of their group, in aligned tiles."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fp4jax.numerics import Site
from fp4jax.numerics.groups import Groups
from fp4jax.ops import grouped_matmul
from fp4jax.ops.gemms import Gemms
from fp4jax.ops.operands import Operand
from fp4jax.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class GroupedGemms(Gemms):
    """Those of a linear layer for each of e groups of tokens.

    y_t = x_t w_{of t},  dx_t = dy_t w_{of t}^T,  dw_i = sum_{t: of t = i} x_t^T dy_t

    x [t, a, k], w [e, k, n], dy [t, a, n]: the tiles are a batch of operands that are
    quantized by themselves, but for tensor scales, which a group has in common.

    Attributes:
      groups: of the tiles; None until the product is computed, since they are data.
    """

    caller: ClassVar[str] = "ragged_dot"
    groups: Groups | None = None

    @classmethod
    def of_one(cls, operand: jax.Array, recipe: Recipe) -> "GroupedGemms":
        """Returns that of products of which only w is known."""
        aval = jax.typeof(operand)
        return cls(recipe, 1, "rhs", None, operand.dtype, None, aval, aval)

    @property
    def sizes(self) -> tuple[int, int | None, int, int]:
        """Groups e, None, k and n."""
        e, k, n = self.rhs.shape
        return e, None, k, n

    def _groups(self, site: Site) -> Groups | None:
        return Groups(None, self.rhs.shape[0]) if site.is_w else self.groups

    def _emulate(
        self,
        a: Operand,
        b: Operand,
        factors: Sequence[jax.Array] = (),
        *,
        out_sharding: Any,
        dtype: Any,
    ) -> jax.Array:
        del out_sharding
        assert self.groups is not None
        x, y = self._arrays(a, b)
        how = {"factors": factors, "precision": self._precision, "dtype": dtype}
        if a.site.is_wgrad:
            return grouped_matmul.weights(x, y, self.groups, **how)
        return grouped_matmul.rows(x, y, self.groups, axis=b.axis, **how)

    def _scale_of_result(self, operand: Operand) -> jax.Array:
        """Returns the tensor scale of each group, [e]."""
        scale, groups = operand.tensor_scale, self.groups
        assert scale is not None and groups is not None
        if scale.ndim == 0:
            return jnp.broadcast_to(scale, (groups.count,))
        scale = scale.reshape(-1)
        return scale if operand.site.is_w else groups.collect(scale)
