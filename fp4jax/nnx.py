"""Flax NNX: a `dot_general` to inject into layers, with its keys."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.ops.dot_general import DimensionNumbers, dot_general
from fp4jax.recipes import Recipe


class NoiseKey(nnx.Variable):
    """The constant key of a layer; stacked layers hold one each."""


class QuantStep(nnx.Variable):
    """The training step, which `set_step` writes; None until then."""


class DotGeneral(nnx.Module):
    """A `fp4jax.dot_general` with a key of its own.

    The key of a call is the layer's constant key folded with the step that `set_step`
    wrote. Nothing changes in the forward pass, so `jax.jit`, `nnx.jit`, scan and remat
    give the same numbers. Without a step there is no key: evaluation needs none, and
    differentiating a recipe that draws raises, so that forgetting `set_step` does not
    repeat noise silently. Calls of one layer within a step share their noise: give
    micro-batches steps of their own, and layers that differ objects of their own.

    Args:
      recipe: what to quantize.
      rngs: provides the layer's key, from its stream "quant".

    Example:
      >>> from flax import nnx
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> rngs = nnx.Rngs(0)
      >>> dot = fp4jax.nnx.DotGeneral(recipes.ufp4(), rngs=rngs)
      >>> layer = nnx.Linear(64, 32, dot_general=dot, rngs=rngs)
      >>> fp4jax.nnx.set_step(layer, 0)
    """

    def __init__(self, recipe: Recipe, *, rngs: nnx.Rngs):
        self.recipe = recipe
        self.key = NoiseKey(rngs["quant"]())
        self.step = QuantStep(None)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Computes `fp4jax.dot_general` with this layer's recipe and key."""
        step = self.step.get_value()
        key = None if step is None else jax.random.fold_in(self.key.get_value(), step)
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            recipe=self.recipe,
            key=key,
        )


def set_step(model: nnx.Module, step: jax.Array | int) -> None:
    """Writes the training step into every `DotGeneral` of a model.

    Call it inside the jitted step, before the forward pass. Under plain `jax.jit` that
    is on a model made there by `nnx.merge(graph, state, copy=True)`.

    Args:
      model: any module; stacked layers get one copy of the step each.
      step: int32 scalar.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, DotGeneral):
            shape = node.key.get_value().shape
            node.step.set_value(jnp.broadcast_to(jnp.int32(step), shape))
