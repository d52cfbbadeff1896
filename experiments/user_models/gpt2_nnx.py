"""A small GPT-2 in Flax NNX, as someone who never heard of FP4 would write it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

MakeDotGeneral = Callable[[nnx.Rngs], Any]


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 64
    context: int = 32
    num_layers: int = 2
    num_heads: int = 2
    width: int = 64
    remat: bool = True


def linear(
    size: int, out: int, *, dot_general: MakeDotGeneral | None, rngs: nnx.Rngs
) -> nnx.Linear:
    product = jax.lax.dot_general if dot_general is None else dot_general(rngs)
    return nnx.Linear(size, out, dot_general=product, rngs=rngs)


class MLP(nnx.Module):
    def __init__(self, width: int, **options):
        self.up = linear(width, 4 * width, **options)
        self.down = linear(4 * width, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Layer norms first, as GPT-2 has them."""

    def __init__(
        self, config: Config, *, dot_general: MakeDotGeneral | None, rngs: nnx.Rngs
    ):
        self.norm1 = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.num_heads, config.width, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(config.width, rngs=rngs)
        self.mlp = MLP(config.width, dot_general=dot_general, rngs=rngs)
        if dot_general is not None:
            for name in ("query", "key", "value", "out"):
                layer = getattr(self.attention, name)
                layer.dot_general = nnx.data(dot_general(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.mlp(self.norm2(x))


class GPT2(nnx.Module):
    """Learned positions, blocks stacked and scanned, tied output head.

    `dot_general` makes the product of each linear layer; None is Flax's own.
    """

    def __init__(
        self,
        config: Config = Config(),
        *,
        dot_general: MakeDotGeneral | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.tokens = nnx.Embed(config.vocab_size, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stack(rngs):
            return Block(config, dot_general=dot_general, rngs=rngs)

        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits [b, t, v] of the token after each of `tokens` [b, t]."""

        def run(x, block):
            return block(x)

        if self.config.remat:
            run = nnx.remat(run)
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.tokens.attend(self.norm(x))


def batch(step: int, config: Config = Config()) -> tuple[jax.Array, jax.Array]:
    """Returns inputs and targets [b, t]: sequences that count in steps of their own."""
    starts = jnp.arange(4)[:, None] + 5 * step
    strides = 1 + jnp.arange(4)[:, None]
    rows = (starts + strides * jnp.arange(config.context + 1)[None]) % config.vocab_size
    return rows[:, :-1], rows[:, 1:]
