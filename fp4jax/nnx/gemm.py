"""What NNX layers call in place of `lax.dot_general` and `jnp.einsum`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.nnx.arguments import check_rngs
from fp4jax.ops.dot_general import DimensionNumbers, dot_general
from fp4jax.ops.einsum import einsum
from fp4jax.ops.gather import Gather
from fp4jax.ops.held import is_due
from fp4jax.ops.residuals import PackedOperand, PackedWeight
from fp4jax.recipes import Recipe


class NoiseKey(nnx.Variable):
    """The constant key of a layer; stacked layers hold one each."""


class QuantStep(nnx.Variable):
    """The training step, which `set_step` writes; None until then."""


class Microbatch(nnx.Variable):
    """Which part of the step's batch is processed, or None: all of it at once."""


class QuantizedWeight(nnx.Variable):
    """The layer's weight as its products multiply by it, a `PackedWeight`, or None.

    `quantize_weights` writes it; None until then: every product quantizes its own.
    """


class Held(nnx.Variable):
    """Amaxes of x, w and dy, float32 [*stack, 3], where the recipe holds any.

    Of a layer of groups [*stack, groups, 3].

    0 is one not yet seen, which is computed afresh. `fp4jax.nnx.value_and_grad` writes
    them; no optimizer does.
    """


class Gemm(nnx.Module):
    """The recipe of a layer and the state that its GEMMs read.

    The key of a call is the layer's constant key folded with the step that `set_step`
    wrote. Nothing changes in the forward pass, so `jax.jit`, `nnx.jit`, scan and remat
    give the same numbers. Without a step there is no key: evaluation needs none, and
    differentiating a recipe that draws raises, so that forgetting `set_step` does not
    repeat noise silently. Calls of one layer within a step share their noise: name the
    microbatch to `set_step`, and give layers that differ objects of their own.

    Args:
      recipe: what to quantize.
      rngs: provides the layer's key, from its stream "quant".
      stack: leading axes of the layer's kernel where layers are stacked for a scan.
    """

    def __init__(self, recipe: Recipe, *, rngs: nnx.Rngs, stack: tuple[int, ...] = ()):
        check_rngs(rngs, type(self).__name__, "quant")
        key = rngs["quant"]()
        self.key = NoiseKey(jax.random.split(key, stack) if stack else key)
        self.step = QuantStep(None)
        self.microbatch = Microbatch(None)
        self.weight = QuantizedWeight(None)
        self.held = Held(None)
        self.set_recipe(recipe)

    def set_recipe(self, recipe: Recipe) -> None:
        """Replaces the recipe; key, step and amaxes stay, no quantized weight does."""
        self.recipe = recipe
        self.weight.set_value(None)
        if recipe.holds and self.held.get_value() is None:
            shape = (*self.key.get_value().shape, *self.held_shape)
            self.held.set_value(jnp.zeros(shape, jnp.float32))

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of the amaxes of one layer."""
        return (3,)

    def due(self, step: jax.Array) -> list[jax.Array]:
        """Returns of each operand that not every step samples whether this one does."""
        if (held := self._amaxes()) is None:
            return []
        return [
            jnp.any(is_due(held[..., operand], every=every, step=step))
            for operand, every in enumerate(self.recipe.every)
            if every not in (None, 1)
        ]

    def _amaxes(self) -> jax.Array | None:
        """Returns those that the recipe holds, or None."""
        if not self.recipe.holds:
            return None
        if (held := self.held.get_value()) is None:
            raise ValueError(
                f"{type(self).__name__}: state must be that of its recipe, got none of "
                "the amaxes that it holds. Restore the state of a model with this "
                "recipe, or call set_recipe to begin with new amaxes."
            )
        return held

    def _known(self, w: jax.Array) -> PackedWeight | None:
        """Returns what `quantize_weights` made of the kernel, or None."""
        packed = self.weight.get_value()
        # None as well where the layer casts its kernel to something else.
        return packed if packed is not None and packed.dtype == w.dtype else None

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments of `fp4jax.dot_general` that this layer decides."""
        step = self.step.get_value()
        key = None if step is None else jax.random.fold_in(self.key.get_value(), step)
        held = self._amaxes()
        return {
            "recipe": self.recipe,
            "key": key,
            "held": held,
            "step": None if held is None else step,
            "microbatch": self.microbatch.get_value(),
        }


class DotGeneral(Gemm):
    """A `fp4jax.dot_general` with a key of its own, for `dot_general` of a layer.

    Args: as of `Gemm`.

    Example:
      >>> from flax import nnx
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> rngs = nnx.Rngs(0)
      >>> dot = fp4jax.nnx.DotGeneral(recipes.ufp4(), rngs=rngs)
      >>> layer = nnx.Linear(64, 32, dot_general=dot, rngs=rngs)
      >>> fp4jax.nnx.set_step(layer, 0)
    """

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        packed: PackedOperand | None = None,
        gather: Gather | None = None,
    ) -> jax.Array:
        """Computes `fp4jax.dot_general` with this layer's recipe and state."""
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            packed=packed,
            packed_w=self._known(rhs),
            gather=gather,
            **self._arguments(),
        )


class Einsum(Gemm):
    """A `fp4jax.einsum` with a key of its own, for `einsum_op` of an `nnx.Einsum`.

    Args: as of `Gemm`.

    Example:
      >>> from flax import nnx
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> rngs = nnx.Rngs(0)
      >>> op = fp4jax.nnx.Einsum(recipes.ufp4(), rngs=rngs)
      >>> layer = nnx.Einsum("btd,dhe->bthe", (32, 2, 16), einsum_op=op, rngs=rngs)
    """

    def __call__(
        self,
        spec: str,
        lhs: jax.Array,
        rhs: jax.Array,
        *more: jax.Array,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Computes `fp4jax.einsum` with this layer's recipe and state; `rhs` is w."""
        return einsum(
            spec,
            lhs,
            rhs,
            *more,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            **self._arguments(),
        )
