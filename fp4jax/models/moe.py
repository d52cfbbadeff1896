"""A mixture of experts: every token passes those that its router chooses.

None is left, unless `capacity_factor` bounds the room of devices. Tokens are laid out
in tiles by `dispatch`; where a mesh spreads experts, each device computes its own:
`expert_parallel`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fp4jax.models import expert_parallel
from fp4jax.models.config import ModelConfig
from fp4jax.models.dispatch import Dispatch
from fp4jax.models.layers import (
    ACTIVATION_DTYPE,
    LINEAR_OUTPUT,
    residual_std,
    shared_recipe,
)
from fp4jax.models.mlp import MLPS, squared_relu, swiglu
from fp4jax.models.router import Router, Routing
from fp4jax.nnx import GroupedLinear, RaggedDot
from fp4jax.ops.grouped_dot import pack_tokens
from fp4jax.ops.tiles import tile_rows
from fp4jax.recipes import Recipe


class Balance(NamedTuple):
    """How evenly a layer's experts are used.

    Attributes:
      aux_loss: float32 [], what is added to the loss.
      loads: int32 [e], the tokens that each got, without padding.
      dropped: int32 [], the choices of tokens for which a device had no room; None:
        there is room for all.
    """

    aux_loss: jax.Array
    loads: jax.Array
    dropped: jax.Array | None = None


Balances = Sequence[Balance | None]  # of each stack of a model, None without experts


def aux_loss(balances: Balances) -> jax.Array:
    """Returns the sum over the blocks of what is added to the loss, float32 []."""
    return sum((jnp.sum(b.aux_loss) for b in balances if b), jnp.zeros((), jnp.float32))


def loads(balances: Balances) -> jax.Array | None:
    """Returns int32 [blocks, e], the tokens of each expert; None without experts."""
    found = [balance.loads for balance in balances if balance]
    return jnp.concatenate(found) if found else None


class MoE(nnx.Module):
    """y = sum over the chosen experts i of weight_i expert_i(x), + shared(x).

    An expert is an MLP of the model's kind. The products of experts take a recipe; the
    router stays in float32, and so does the sum over experts.
    """

    def __init__(
        self, config: ModelConfig, recipes: Mapping[str, Recipe], *, rngs: nnx.Rngs
    ):
        assert config.moe is not None  # as the config has checked
        self.config = config.moe
        d, f, count = config.d_model, config.moe.d_expert, config.moe.num_experts
        self.router = Router(config.moe, d, rngs=rngs)

        def experts(
            name: str,
            d_in: int,
            d_out: int,
            axes: tuple[str | None, str | None],
            init_std: float = 1.0,
        ) -> GroupedLinear:
            recipe = recipes[f"moe/{name}"]
            return GroupedLinear(
                count,
                d_in,
                d_out,
                kernel_init=nnx.initializers.variance_scaling(
                    init_std**2, "fan_in", "truncated_normal", batch_axis=(0,)
                ),
                kernel_metadata={"axes": ("expert", *axes)},
                ragged_dot=RaggedDot(recipe, groups=count, rngs=rngs),
                preferred_element_type=ACTIVATION_DTYPE,
                rngs=rngs,
            )

        up, down = ("embed", None), (None, "embed")
        self.gate = experts("gate", d, f, up) if config.mlp == "swiglu" else None
        self.up = experts("up", d, f, up)
        self.down = experts("down", f, d, down, residual_std(config))
        self.shared = _shared(config, recipes, rngs) if config.moe.d_shared else None

    def __call__(
        self, x: jax.Array, *, counts: jax.Array | None = None
    ) -> tuple[jax.Array, Balance]:
        """Maps each vector of x [b, t, d] by the experts of its token.

        Args:
          x: normalized activations.
          counts: bool [b, t], whose use of experts is balanced; None: of all tokens.
        """
        routing = self.router(x, counts=counts)
        y, dropped = self._routed(x, routing)
        if self.shared is not None:
            y = y + self.shared(x)
        aux_loss = self.config.aux_weight * routing.aux_loss
        dropped = jnp.sum(dropped) if self.config.capacity_factor else None
        return y, Balance(aux_loss, routing.loads, dropped)

    def _routed(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Returns what `_mixture` does, of all devices."""
        layers = [layer for layer in (self.gate, self.up, self.down) if layer]
        recipes = (layer.recipe for layer in layers)
        is_spread = expert_parallel.is_spread(layers, len(x))
        dispatch_of = functools.partial(
            Dispatch.of,
            count=self.config.num_experts,
            rows=math.lcm(*(tile_rows(recipe) for recipe in recipes if recipe)),
            is_spread=is_spread,
            capacity_factor=self.config.capacity_factor,
        )
        mixture = functools.partial(_mixture, dispatch_of=dispatch_of)
        tokens = (x, routing.experts, routing.weights)
        if is_spread:
            return expert_parallel.over_devices(mixture, layers, *tokens)
        return mixture(layers, *tokens)


def _mixture(
    layers: Sequence[GroupedLinear],
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    *,
    dispatch_of: Callable[[jax.Array], Dispatch],
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sums [b, t, d] of the experts of tokens x [b, t, d].

    And how many choices were dropped of each row, int32 [b].
    """
    dispatch = dispatch_of(experts)

    def linear(layer: GroupedLinear, x: jax.Array, **packed: Any) -> jax.Array:
        y = layer(
            x,
            dispatch.groups,
            positions=dispatch.positions,
            num_positions=dispatch.num_positions,
            **packed,
        )
        # A device has room for the tokens of all that share experts with it, most of it
        # unused: more than is kept until the backward pass.
        is_spread = dispatch.sizes is not None
        return y if is_spread else checkpoint_name(y, LINEAR_OUTPUT)

    *gate, up, down = layers
    sent = dispatch.send(x, top_k=experts.shape[2])
    recipe = shared_recipe(*(layer.ragged_dot for layer in (*gate, up)))
    shared = {}  # what gate and up save of the same tokens
    if recipe is not None:
        shared["packed"] = pack_tokens(sent, dispatch.groups, recipe=recipe)
    hidden = linear(up, sent, **shared)
    if gate:
        hidden = swiglu(linear(gate[0], sent, **shared), hidden)
    else:
        hidden = squared_relu(hidden)
    y = dispatch.combine(linear(down, hidden), weights).astype(x.dtype)
    return y, dispatch.dropped


def _shared(config: ModelConfig, recipes: Mapping[str, Recipe], rngs: nnx.Rngs):
    """Returns the expert that every token passes: an MLP of its width."""
    assert config.moe is not None
    of_mlp = {path.replace("moe/shared", "mlp"): r for path, r in recipes.items()}
    config = dataclasses.replace(config, d_ff=config.moe.d_shared)
    return MLPS[config.mlp](config, of_mlp, rngs=rngs)
