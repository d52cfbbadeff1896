"""What maps each token by itself."""

from collections.abc import Mapping

import jax
from flax import nnx

from fp4jax.models.config import ModelConfig
from fp4jax.models.layers import Linear, packed_once, residual_std
from fp4jax.recipes import Recipe

_UP, _DOWN = ("embed", "mlp"), ("mlp", "embed")


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up."""
    return jax.nn.silu(gate) * up


def squared_relu(up: jax.Array) -> jax.Array:
    """Returns relu(up)^2."""
    return jax.nn.relu(up) ** 2


class SwiGLU(nnx.Module):
    """y = (silu(x W_gate) * x W_up) W_down."""

    def __init__(
        self, config: ModelConfig, recipes: Mapping[str, Recipe], *, rngs: nnx.Rngs
    ):
        d, f = config.d_model, config.d_ff
        self.gate, self.up = (
            Linear(d, f, axes=_UP, recipe=recipes[f"mlp/{name}"], rngs=rngs)
            for name in ("gate", "up")
        )
        self.down = Linear(
            f,
            d,
            axes=_DOWN,
            recipe=recipes["mlp/down"],
            init_std=residual_std(config),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps each vector of x [b, t, d] by itself."""
        packed = packed_once(x, self.gate, self.up)
        gate, up = self.gate(x, packed=packed), self.up(x, packed=packed)
        return self.down(swiglu(gate, up))  # [b, t, d]


class SquaredReLU(nnx.Module):
    """y = relu(x W_up)^2 W_down.

    References: So et al., Primer, 2021.
    """

    def __init__(
        self, config: ModelConfig, recipes: Mapping[str, Recipe], *, rngs: nnx.Rngs
    ):
        d, f = config.d_model, config.d_ff
        self.up = Linear(d, f, axes=_UP, recipe=recipes["mlp/up"], rngs=rngs)
        self.down = Linear(
            f,
            d,
            axes=_DOWN,
            recipe=recipes["mlp/down"],
            init_std=residual_std(config),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps each vector of x [b, t, d] by itself."""
        return self.down(squared_relu(self.up(x)))  # [b, t, d]


MLPS = {"swiglu": SwiGLU, "relu2": SquaredReLU}
