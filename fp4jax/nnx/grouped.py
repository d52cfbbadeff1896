"""Linear layers with a kernel for each of several groups of rows, such as experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.nnx.arguments import check_rngs
from fp4jax.nnx.gemm import Gemm
from fp4jax.numerics.groups import Groups
from fp4jax.ops.grouped_dot import grouped_dot, pack_experts
from fp4jax.ops.ragged_dot import ragged_dot
from fp4jax.ops.residuals import PackedOperand, PackedWeight
from fp4jax.recipes import Recipe

_FAN_IN = nnx.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", batch_axis=(0,)
)


class RaggedDot(Gemm):
    """A `fp4jax.ragged_dot` with a key of its own, for `ragged_dot` of a layer.

    Args:
      recipe: what to quantize.
      groups: number of groups, each of which holds amaxes of its own.
      rngs: as of `Gemm`.
      stack: as of `Gemm`.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        groups: int,
        rngs: nnx.Rngs,
        stack: tuple[int, ...] = (),
    ):
        self.groups = groups
        super().__init__(recipe, rngs=rngs, stack=stack)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the amaxes of one layer."""
        return (self.groups, 3)

    def __call__(
        self,
        x: jax.Array,
        w: jax.Array,
        groups: jax.Array | Groups,
        *,
        positions: jax.Array | None = None,
        num_positions: int | None = None,
        packed: PackedOperand | None = None,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Computes `fp4jax.ragged_dot` with this layer's recipe and state.

        Args:
          x: [m, k] rows sorted by group, or [t, a, k] tiles of them.
          w: [e, k, n].
          groups: int32 [e] sizes of the groups of rows, or the groups of the tiles.
          positions: uint32 [m] or [t, a], as for `ragged_dot` and `grouped_dot`.
          num_positions: of tiles, those of one microbatch; needed where `set_step`
            named one.
          packed: of tiles, from `pack_tokens`.
          precision: as for `lax.dot_general`.
          preferred_element_type: the dtype of the result.

        Raises:
          ValueError: `num_positions` or `packed` beside sizes; a microbatch of tiles
            without `num_positions`; and as `fp4jax.ragged_dot`.
        """
        arguments = self._arguments()
        arguments |= {
            "positions": positions,
            "precision": precision,
            "preferred_element_type": preferred_element_type,
        }
        if not isinstance(groups, Groups):
            if num_positions is not None or packed is not None:
                raise ValueError(
                    "RaggedDot: num_positions and packed must be None where groups are "
                    "sizes, since they are of tiles. Leave them out, or pass tiles."
                )
            return ragged_dot(x, w, groups, **arguments)
        return grouped_dot(
            x,
            w,
            groups,
            first_position=_first(arguments.pop("microbatch"), num_positions),
            packed=packed,
            packed_w=self._known(w),
            **arguments,
        )

    def packed(self, w: jax.Array) -> PackedWeight:
        """Returns the kernels as products of the step multiply by them."""
        if (known := self._known(w)) is not None:
            return known
        arguments = self._arguments()
        names = ("recipe", "key", "held", "step")
        return pack_experts(w, **{name: arguments[name] for name in names})


def _first(microbatch: jax.Array | None, size: int | None) -> jax.Array | None:
    """Returns what is added to the positions of a microbatch of tiles."""
    if microbatch is None:
        return None
    if size is None:
        raise ValueError(
            "RaggedDot: num_positions must be given for a microbatch of tiles, or all "
            "would draw the same noise, got None. Pass the positions of one microbatch."
        )
    return microbatch * size


class GroupedLinear(nnx.Module):
    """y_g = x_g W_g for each group g of rows: the experts of a mixture, for instance.

    Args:
      groups: number of kernels.
      in_features: rows of a kernel.
      out_features: columns of a kernel.
      kernel_init: initializer of the kernels [groups, in, out].
      kernel_metadata: of their variable.
      ragged_dot: what multiplies: `lax.ragged_dot`, or a `RaggedDot`.
      preferred_element_type: the dtype of the result.
      rngs: its stream `params` draws the kernels.

    Example:
      >>> import jax.numpy as jnp
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> experts = fp4jax.nnx.GroupedLinear(4, 64, 32, rngs=nnx.Rngs(0))
      >>> fp4jax.nnx.quantize_model(experts, recipes.mxfp8(), rngs=nnx.Rngs(1))
      >>> experts(jnp.ones((20, 64)), jnp.array([3, 0, 9, 8])).shape
      (20, 32)
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        *,
        kernel_init: nnx.Initializer = _FAN_IN,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        ragged_dot: Any = lax.ragged_dot,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
    ):
        check_rngs(rngs, "GroupedLinear", "params")
        self.kernel_shape = (groups, in_features, out_features)
        self.kernel = nnx.Param(
            kernel_init(rngs.params(), self.kernel_shape, jnp.float32),
            **kernel_metadata,
        )
        is_module = isinstance(ragged_dot, nnx.Module)
        self.ragged_dot = nnx.data(ragged_dot) if is_module else ragged_dot
        self.preferred_element_type = preferred_element_type

    @property
    def recipe(self) -> Recipe | None:
        """How the product is quantized; None where it is not."""
        return getattr(self.ragged_dot, "recipe", None)

    def __call__(
        self, x: jax.Array, groups: jax.Array | Groups, **arguments: Any
    ) -> jax.Array:
        """Returns y [m, out] of x [m, in], or tiles of tiles.

        Args:
          x: rows sorted by group, or tiles of them.
          groups: int32 sizes of the groups, or where x is tiles their `Groups`.
          **arguments: others of a `RaggedDot`, such as `positions`.
        """
        return self.ragged_dot(
            x,
            self.kernel[...],
            groups,
            preferred_element_type=self.preferred_element_type,
            **arguments,
        )
