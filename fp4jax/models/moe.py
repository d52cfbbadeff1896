"""A mixture of experts: every token passes those that its router chooses, none is left.

Tokens are laid out in tiles, each of one expert and one row of the batch: blocks along
tokens are then the same however the rows of a batch are divided.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fp4jax.models.config import ModelConfig
from fp4jax.models.layers import ACTIVATION_DTYPE, LINEAR_OUTPUT, residual_std
from fp4jax.models.mlp import MLPS
from fp4jax.models.router import Router, Routing
from fp4jax.nnx import GroupedLinear, RaggedDot
from fp4jax.numerics.groups import Groups
from fp4jax.ops.tiles import Tiles, tile_rows
from fp4jax.recipes import Recipe


class Balance(NamedTuple):
    """How evenly a layer's experts are used.

    Attributes:
      aux_loss: float32 [], what is added to the loss.
      loads: int32 [e], the tokens that each got.
    """

    aux_loss: jax.Array
    loads: jax.Array


Balances = Sequence[Balance | None]  # of each stack of a model, None without experts


def aux_loss(balances: Balances) -> jax.Array:
    """Returns the sum over the blocks of what is added to the loss, float32 []."""
    return sum((jnp.sum(b.aux_loss) for b in balances if b), jnp.zeros(()))


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

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Balance]:
        """Maps each vector of x [b, t, d] by the experts of its token."""
        routing = self.router(x)
        y = self._routed(x, routing)
        if self.shared is not None:
            y = y + self.shared(x)
        aux_loss = self.config.aux_weight * routing.aux_loss
        return y, Balance(aux_loss, routing.loads)

    def _routed(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Returns the weighted sum [b, t, d] of what the chosen experts return."""
        b, t, top_k = routing.experts.shape
        row = jnp.arange(b, dtype=jnp.int32)[:, None, None]
        tiles = Tiles.of_labels(
            (routing.experts * b + row).reshape(-1),
            self.config.num_experts * b,
            rows=self._tile_rows(),
        )
        # In float32, so that the gradient of a token is summed so over its experts.
        x_f32 = x.astype(jnp.float32)[:, :, None]
        copies = jnp.broadcast_to(x_f32, (b, t, top_k, x.shape[-1])).astype(x.dtype)
        num_rows = b * t * top_k
        positions = tiles.positions(jnp.arange(num_rows, dtype=jnp.uint32))
        y = self._experts(
            tiles.gather(copies.reshape(num_rows, -1)),
            Groups(tiles.of // b, self.config.num_experts),
            positions,
            num_rows,
        )
        y = tiles.scatter(y).reshape(b, t, top_k, -1).astype(jnp.float32)
        return jnp.sum(y * routing.weights[..., None], 2).astype(x.dtype)

    def _tile_rows(self) -> int:
        """Returns the rows of a tile: whole blocks of the recipe of every product."""
        recipes = (layer.recipe for layer in (self.gate, self.up, self.down) if layer)
        return math.lcm(*(tile_rows(recipe) for recipe in recipes if recipe))

    def _experts(
        self, x: jax.Array, groups: Groups, positions: jax.Array, num_positions: int
    ) -> jax.Array:
        """Maps tiles [t, a, d] by the expert of each."""

        def linear(layer: GroupedLinear, x: jax.Array) -> jax.Array:
            y = layer(x, groups, positions=positions, num_positions=num_positions)
            return checkpoint_name(y, LINEAR_OUTPUT)

        up = linear(self.up, x)
        if self.gate is None:
            return linear(self.down, jax.nn.relu(up) ** 2)
        return linear(self.down, jax.nn.silu(linear(self.gate, x)) * up)


def _shared(config: ModelConfig, recipes: Mapping[str, Recipe], rngs: nnx.Rngs):
    """Returns the expert that every token passes: an MLP of its width."""
    assert config.moe is not None
    of_mlp = {path.replace("moe/shared", "mlp"): r for path, r in recipes.items()}
    config = dataclasses.replace(config, d_ff=config.moe.d_shared)
    return MLPS[config.mlp](config, of_mlp, rngs=rngs)
