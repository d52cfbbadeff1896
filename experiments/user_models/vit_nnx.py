"""A small vision transformer in Flax NNX, as its author would write it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

MakeDotGeneral = Callable[[nnx.Rngs], Any]


@dataclasses.dataclass(frozen=True)
class Config:
    image: int = 16
    patch: int = 4
    channels: int = 3
    num_classes: int = 10
    num_layers: int = 2
    num_heads: int = 2
    width: int = 64


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
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nnx.Module):
    """Patches by a convolution, a class token, blocks one by one, a linear head.

    `dot_general` makes the product of each linear layer; None is Flax's own.
    """

    def __init__(
        self,
        config: Config = Config(),
        *,
        dot_general: MakeDotGeneral | None = None,
        rngs: nnx.Rngs,
    ):
        patch, width = (config.patch, config.patch), config.width
        count = (config.image // config.patch) ** 2
        self.patches = nnx.Conv(
            config.channels, width, patch, strides=patch, padding="VALID", rngs=rngs
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        init = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (1, count + 1, width)))
        self.blocks = nnx.List(
            [
                Block(config, dot_general=dot_general, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = linear(
            width, config.num_classes, dot_general=dot_general, rngs=rngs
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits [b, classes] of images [b, h, w, channels]."""
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])  # [b, patches, d]
        first = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def batch(step: int, config: Config = Config()) -> tuple[jax.Array, jax.Array]:
    """Returns images [b, h, w, channels] and labels [b]: noisy waves, one a class."""
    labels = jnp.arange(8) % config.num_classes
    phase = jnp.arange(config.image) / config.image * 2 * jnp.pi
    waves = jnp.sin((1 + labels)[:, None] * phase[None])  # [b, w]
    shape = (8, config.image, config.image, config.channels)
    noise = jax.random.normal(jax.random.key(step), shape)
    return waves[:, None, :, None] + 0.3 * noise, labels
