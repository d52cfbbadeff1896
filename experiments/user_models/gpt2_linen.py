"""A small GPT-2 in Flax Linen, as its author would write it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

OWG = "_overwrite_with_gradient"


class MLP(nn.Module):
    width: int
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(4 * self.width, dot_general_cls=self.dot_general_cls, name="up")(x)
        x = nn.gelu(x)
        return nn.Dense(self.width, dot_general_cls=self.dot_general_cls, name="down")(
            x
        )


class Block(nn.Module):
    """Layer norms first, as GPT-2 has them."""

    num_heads: int
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads,
            qkv_dot_general_cls=self.dot_general_cls,
            out_dot_general_cls=self.dot_general_cls,
            name="attention",
        )
        norm = nn.LayerNorm(name="norm1")
        x = x + attention(norm(x), mask=mask)  # pyrefly: ignore[unsupported-operation]
        mlp = MLP(x.shape[-1], self.dot_general_cls, name="mlp")
        return x + mlp(nn.LayerNorm(name="norm2")(x)), None


class GPT2(nn.Module):
    """Learned positions, blocks stacked and scanned, tied output head.

    `dot_general_cls` makes the product of each linear layer; None is Flax's own.
    """

    vocab_size: int = 64
    context: int = 32
    num_layers: int = 2
    num_heads: int = 2
    width: int = 64
    remat: bool = True
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits [b, t, v] of the token after each of `tokens` [b, t]."""
        embed = nn.Embed(self.vocab_size, self.width, name="tokens")
        positions = nn.Embed(self.context, self.width, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        blocks = nn.scan(
            block,
            variable_axes={"params": 0, OWG: 0},
            split_rngs={"params": True, "quant": True},
            in_axes=nn.broadcast,
            length=self.num_layers,
        )
        blocks = blocks(self.num_heads, self.dot_general_cls, name="blocks")
        x, _ = blocks(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm(name="norm")(x))
