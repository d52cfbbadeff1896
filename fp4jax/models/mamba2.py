"""Mamba-2: a state of each head that decays, is written and is read at every token."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.models.config import ModelConfig
from fp4jax.models.layers import ACTIVATION_DTYPE, Linear, residual_std
from fp4jax.models.ssd import ssd
from fp4jax.recipes import Recipe

# Where rates and step sizes start, uniformly.
_FIRST_RATES = (1.0, 16.0)
_FIRST_LOG_STEPS = (math.log(1e-3), math.log(1e-1))


class Mamba2(nnx.Module):
    """The Mamba-2 layer.

    z, xBC, dt = split(u W_input)
    x, B, C = split(silu(conv(xBC)))
    y = ssd(x, softplus(dt + dt_bias), -exp(a_log), B, C) + skip x
    out = norm(y silu(z)) W_output

    The two projections take a recipe. What lies between stays in high precision:
    bfloat16 operands of products, float32 decays and states. The devices of a mesh
    that lie along `tensor` all compute the same.

    Args:
      config: whose `mamba` is the shape.
      recipes: of "mamba/input" and "mamba/output".
      rngs: streams `params` and `quant`.

    References: Dao & Gu, Transformers are SSMs, 2024.
    """

    def __init__(
        self, config: ModelConfig, recipes: Mapping[str, Recipe], *, rngs: nnx.Rngs
    ):
        shape = config.mamba
        assert shape is not None  # as the config has checked
        self.shape = shape
        self.input = Linear(
            config.d_model,
            shape.d_inner + shape.d_mixed + shape.num_heads,
            axes=("embed", None),
            recipe=recipes["mamba/input"],
            rngs=rngs,
        )
        self.conv = CausalConv(shape.d_mixed, width=shape.d_conv, rngs=rngs)
        self.a_log = nnx.Param(jnp.log(_uniform(shape.num_heads, _FIRST_RATES, rngs)))
        steps = jnp.exp(_uniform(shape.num_heads, _FIRST_LOG_STEPS, rngs))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(steps)))  # softplus gives the steps
        self.skip = nnx.Param(jnp.ones(shape.num_heads, jnp.float32))
        self.norm = GroupedRMSNorm(
            shape.d_inner, groups=shape.num_groups, epsilon=config.norm_eps, rngs=rngs
        )
        self.output = Linear(
            shape.d_inner,
            config.d_model,
            axes=(None, "embed"),
            recipe=recipes["mamba/output"],
            init_std=residual_std(config),
            rngs=rngs,
        )

    def __call__(self, u: jax.Array, *, documents: jax.Array) -> jax.Array:
        """Mixes u [b, t, d] over its documents, of `count_documents`."""
        shape, inner = self.shape, self.shape.d_inner
        parts = (inner, inner + shape.d_mixed)
        z, mixed, dt = jnp.split(self.input(u), parts, axis=-1)
        mixed = jax.nn.silu(self.conv(mixed, documents=documents))
        parts = (inner, inner + shape.num_groups * shape.d_state)
        x, b, c = jnp.split(mixed.astype(ACTIVATION_DTYPE), parts, axis=-1)
        by_head = (*u.shape[:2], shape.num_heads, shape.head_dim)
        by_group = (*u.shape[:2], shape.num_groups, shape.d_state)
        x, b, c = x.reshape(by_head), b.reshape(by_group), c.reshape(by_group)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...][None, None])
        a = -jnp.exp(self.a_log[...])
        y = ssd(x, dt, a, b, c, documents=documents, chunk=shape.chunk)
        y += self.skip[...][None, None, :, None] * x  # [b, t, h, p] float32
        y = y.reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
        return self.output(self.norm(y).astype(ACTIVATION_DTYPE))


class CausalConv(nnx.Module):
    """y_t = bias + sum over i < width of taps_i x_{t - i} of the same document.

    Each channel by itself, in float32.
    """

    def __init__(self, channels: int, *, width: int, rngs: nnx.Rngs):
        bound = width**-0.5
        self.taps = nnx.Param(
            jax.random.uniform(
                rngs.params(),
                (width, channels),
                jnp.float32,
                minval=-bound,
                maxval=bound,
            )
        )
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32))

    def __call__(self, x: jax.Array, *, documents: jax.Array) -> jax.Array:
        """Returns y [b, t, channels] float32 of x [b, t, channels]."""
        taps, y = self.taps[...], self.bias[...][None, None]
        for lag, tap in enumerate(taps):
            earlier = jnp.pad(x, [(0, 0), (lag, 0), (0, 0)])[:, : x.shape[1]]
            same = documents == jnp.pad(documents, [(0, 0), (lag, 0)])[:, : x.shape[1]]
            y += jnp.where(same[..., None], tap[None, None] * earlier, 0)
        return y


class GroupedRMSNorm(nnx.RMSNorm):
    """An RMSNorm of each group of channels, with a scale for every channel."""

    def __init__(self, size: int, *, groups: int, epsilon: float, rngs: nnx.Rngs):
        super().__init__(size, epsilon=epsilon, feature_axes=(-2, -1), rngs=rngs)
        self.groups = groups

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes x [*b, size], float32."""
        grouped = x.reshape(*x.shape[:-1], self.groups, -1)
        return super().__call__(grouped).reshape(x.shape)


def count_documents(segment_ids: jax.Array) -> jax.Array:
    """Returns int32 [b, t]: how many documents of the row came before a token's own.

    A document begins wherever the ids [b, t] change.
    """
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(changes, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])


def _uniform(count: int, bounds: tuple[float, float], rngs: nnx.Rngs) -> jax.Array:
    low, high = bounds
    return jax.random.uniform(
        rngs.params(), (count,), jnp.float32, minval=low, maxval=high
    )
