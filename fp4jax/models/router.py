"""The router of a mixture of experts, in float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.models.config import MoEConfig
from fp4jax.sharding import spec, spreads_rows


class RouterBias(nnx.Variable):
    """What is added to the scores of experts where they are chosen, float32 [e]."""


class Routing(NamedTuple):
    """Where tokens go, those of padding among them, which nothing counts.

    Attributes:
      experts: int32 [b, t, top_k], the experts of each token.
      weights: float32 [b, t, top_k], of what each of them returns.
      aux_loss: float32 [], 1 where experts are equally loaded, else more; 0 where no
        token counts.
      loads: int32 [e], the number of tokens that each expert gets.
    """

    experts: jax.Array
    weights: jax.Array
    aux_loss: jax.Array
    loads: jax.Array


class Router(nnx.Module):
    """Sends each token to the experts with the highest scores.

    scores = softmax(x W) or sigmoid(x W),  chosen = top_k(scores + bias),
    weights = scaling scores[chosen] (/ sum of scores[chosen])

    The bias decides the choice only; no gradient moves it, but `move_bias`.

    References: DeepSeek-V3, 2024, for the bias; Fedus et al., Switch Transformers,
    2021, for the auxiliary loss.
    """

    def __init__(self, config: MoEConfig, d_model: int, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        shape = (d_model, config.num_experts)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        balances = config.bias_rate > 0
        zeros = jnp.zeros(config.num_experts, jnp.float32)
        self.bias = RouterBias(zeros if balances else None)

    def __call__(self, x: jax.Array, *, counts: jax.Array | None = None) -> Routing:
        """Returns the routing of tokens.

        Args:
          x: [b, t, d].
          counts: bool [b, t], which of them loads and auxiliary loss are of; None: all.
        """
        counts = jnp.ones(x.shape[:2], bool) if counts is None else counts
        config = self.config
        logits = jnp.einsum(
            "btd,de->bte",
            x.astype(jnp.float32),
            self.kernel[...],
            precision=lax.Precision.HIGHEST,
        )
        score = {"softmax": jax.nn.log_softmax, "sigmoid": jax.nn.log_sigmoid}
        # Logarithms, whose ratios are finite where scores are too small for float32.
        scores = score[config.score](logits)
        bias = self.bias.get_value()
        preferred = lax.stop_gradient(jnp.exp(scores))
        if bias is not None:
            preferred += bias[None, None]
        experts = _highest(preferred, config.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        weights = jax.nn.softmax(weights) if config.normalize else jnp.exp(weights)
        chosen = jax.nn.one_hot(experts, config.num_experts, dtype=jnp.int32)
        chosen = jnp.where(counts[..., None, None], chosen, 0)
        loads = jnp.sum(chosen, (0, 1, 2), dtype=jnp.int32)
        shares = jnp.where(counts[..., None], jax.nn.softmax(scores), 0)
        imbalance = _imbalance(loads, jnp.sum(shares, (0, 1)), top_k=config.top_k)
        return Routing(experts, weights * config.scaling, imbalance, loads)

    def move_bias(self, loads: jax.Array) -> None:
        """Moves the bias of experts by the rate, up of those with less than the mean.

        bias + rate sign(mean of loads - load)

        Args:
          loads: [*stack, e], the tokens that each got in a step.
        """
        bias = self.bias.get_value()
        if bias is not None:
            loads = loads.astype(jnp.float32)
            error = jnp.mean(loads, -1, keepdims=True) - loads
            self.bias.set_value(bias + self.config.bias_rate * jnp.sign(error))


def _highest(scores: jax.Array, top_k: int) -> jax.Array:
    """Returns the indices [b, t, top_k] of the highest scores [b, t, e]."""
    top = lambda scores: lax.top_k(scores, top_k)[1]
    if not spreads_rows(len(scores)):
        return top(scores)
    rows = spec("batch")  # XLA does not divide this operation, and would gather them
    return jax.shard_map(top, in_specs=rows, out_specs=rows)(scores)


def _imbalance(loads: jax.Array, shares: jax.Array, *, top_k: int) -> jax.Array:
    """Returns e sum_i f_i p_i of the fraction of choices f and the mean score p.

    Args:
      loads: int32 [e].
      shares: float32 [e], sums of the scores, of which each token has 1 in all.
      top_k: choices of a token.
    """
    choices = jnp.maximum(jnp.sum(loads), 1).astype(jnp.float32)
    fractions, means = loads.astype(jnp.float32) / choices, shares / (choices / top_k)
    return loads.size * jnp.sum(fractions * means)
