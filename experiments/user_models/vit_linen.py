"""A small vision transformer in Flax Linen, as its author would write it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    num_heads: int
    dot_general_cls: Any = None

    def setup(self):
        self.norm1, self.norm2 = nn.LayerNorm(), nn.LayerNorm()
        self.attention = nn.MultiHeadDotProductAttention(
            self.num_heads,
            qkv_dot_general_cls=self.dot_general_cls,
            out_dot_general_cls=self.dot_general_cls,
        )
        self.mlp = MLP(self.dot_general_cls)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))  # pyrefly: ignore[unsupported-operation]
        return x + self.mlp(self.norm2(x))


class MLP(nn.Module):
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, cls = x.shape[-1], self.dot_general_cls
        x = nn.gelu(nn.Dense(4 * width, dot_general_cls=cls, name="up")(x))
        return nn.Dense(width, dot_general_cls=cls, name="down")(x)


class ViT(nn.Module):
    """Patches by a convolution, a class token, blocks one by one, a linear head.

    `dot_general_cls` makes the product of each linear layer; None is Flax's own.
    """

    patch: int = 4
    num_classes: int = 10
    num_layers: int = 2
    num_heads: int = 2
    width: int = 64
    dot_general_cls: Any = None

    def setup(self):
        patch = (self.patch, self.patch)
        self.patches = nn.Conv(self.width, patch, strides=patch, padding="VALID")
        self.class_token = self.param(
            "class_token", nn.initializers.zeros, (1, 1, self.width)
        )
        self.blocks = [
            Block(self.num_heads, self.dot_general_cls) for _ in range(self.num_layers)
        ]
        self.norm = nn.LayerNorm()
        self.head = nn.Dense(self.num_classes, dot_general_cls=self.dot_general_cls)

    @nn.compact
    def embed(self, images: jax.Array) -> jax.Array:
        """Returns the class token and the patches [b, 1 + patches, d]."""
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        first = jnp.broadcast_to(self.class_token, (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1)
        init = nn.initializers.normal(0.02)
        return x + self.param("positions", init, (1, *x.shape[1:]))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits [b, classes] of images [b, h, w, channels]."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))
