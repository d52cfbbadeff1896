"""Grouped-query attention with rotary positions, causal within each document."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.models.attend import attend
from fp4jax.models.config import ModelConfig
from fp4jax.models.layers import Linear, RMSNorm, packed_once, residual_std
from fp4jax.recipes import Recipe
from fp4jax.sharding import constrain


class Attention(nnx.Module):
    """softmax(q k^T / sqrt(e)) v over the earlier tokens of the same document.

    The four projections take a recipe; the products of queries, keys and values and the
    softmax stay in high precision. Where the config says so, every query and key is
    first normalized (Henry et al., Query-Key Normalization for Transformers, 2020).
    """

    def __init__(
        self, config: ModelConfig, recipes: Mapping[str, Recipe], *, rngs: nnx.Rngs
    ):
        d, e = config.d_model, config.head_dim
        queries, keys = config.num_heads * e, config.num_kv_heads * e
        self.head_dim = e
        self.query, self.key, self.value = (
            Linear(
                d,
                size,
                axes=("embed", "heads"),
                recipe=recipes[f"attention/{name}"],
                rngs=rngs,
            )
            for name, size in (("query", queries), ("key", keys), ("value", keys))
        )
        self.out = Linear(
            queries,
            d,
            axes=("heads", "embed"),
            recipe=recipes["attention/out"],
            init_std=residual_std(config),
            rngs=rngs,
        )
        norm = lambda: RMSNorm(e, epsilon=config.norm_eps, rngs=rngs)
        self.query_norm = norm() if config.qk_norm else None
        self.key_norm = norm() if config.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None,
        rotation: tuple[jax.Array, jax.Array] | None,
    ) -> jax.Array:
        """Mixes x [b, t, d] over its documents.

        Args:
          x: normalized activations.
          mask: of `document_mask`; None where every row is one document.
          rotation: of `rope`; None where the order of tokens is not told.
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        projections = (self.query, self.key, self.value)
        packed = packed_once(x, *projections)
        query, key, value = (
            constrain(
                project(x, packed=packed).reshape(heads), "batch", None, "heads", None
            )
            for project in projections
        )  # [b, t, h, e], and h_kv heads of keys and values
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        mixed = attend(query, key, value, mask=mask)
        return self.out(mixed.reshape(*x.shape[:2], -1))  # [b, t, d]


def document_mask(segment_ids: jax.Array) -> jax.Array:
    """Returns bool [b, 1, t, t]: query and key are of the same document."""
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]


def rope(
    positions: jax.Array, *, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the rotary cosines and sines of each position.

    angle[p, i] = p * theta^(-2 i / head_dim),  i < head_dim / 2

    Args:
      positions: [b, t] int32, counted within the document.
      head_dim: size of a head.
      theta: the base of the wavelengths.

    Returns:
      cos and sin, each [b, t, 1, head_dim / 2] float32.

    References: Su et al., RoFormer, 2021.
    """
    exponents = -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = theta ** exponents[None, None, None]
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + e / 2) of x [b, t, h, e], in float32, by `rope`."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
