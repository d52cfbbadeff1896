"""Text from a model, token by token, in a buffer of fixed length."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.nnx import set_step
from fp4jax.numerics.checks import is_integer
from fp4jax.train.state import TrainState
from fp4jax.train.step import compiler_options

# (state, tokens, num_prompt, num_tokens, key) -> tokens
Sampler = Callable[..., jax.Array]


def check_sampling(*, temperature: float, top_k: int | None) -> None:
    """Raises ValueError for arguments that `make_sampler` does not take."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            "make_sampler: temperature must be finite and not negative, got "
            f"temperature={temperature}."
        )
    if top_k is not None and (not is_integer(top_k) or top_k < 1):
        raise ValueError(
            f"make_sampler: top_k must be a positive integer, got top_k={top_k!r}."
        )


def make_sampler(
    graph: nnx.GraphDef, *, temperature: float = 1.0, top_k: int | None = None
) -> Sampler:
    """Returns the jitted `sample(state, tokens, num_prompt, num_tokens, key)`.

    token_i ~ softmax(logits_{i-1} / temperature), over the `top_k` largest logits

    There is no cache of keys and values: each token costs a forward pass over the whole
    buffer, so n tokens in a buffer of t cost n t tokens of forward. That is the forward
    pass of training, and one program serves every prompt; under a recipe that scales
    whole tensors, the padding after the text shares its scale.

    Args:
      graph: the model's; its forward pass may be quantized. Held amaxes are read only.
      temperature: 0 takes the most probable token.
      top_k: how many tokens to choose from; None: all.

    Returns:
      A function of the state of a run; `tokens`, [t] int32, which begins with the
      prompt; `num_prompt`, the length of that, at least 1; `num_tokens` to add; and a
      `key`, which with the token's place decides each draw. It returns [t] int32 with
      the new tokens behind the prompt. Prompt and new tokens must fit the buffer: what
      does not is left out.

    Raises:
      ValueError: a negative temperature, or a `top_k` that is no positive integer.
    """
    check_sampling(temperature=temperature, top_k=top_k)

    def choose(logits: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits)
        if top_k is not None and top_k < logits.size:
            values, tokens = lax.top_k(logits, top_k)
            return tokens[jax.random.categorical(key, values / temperature)]
        return jax.random.categorical(key, logits / temperature)

    def sample(
        state: TrainState,
        tokens: jax.Array,
        num_prompt: jax.Array,
        num_tokens: jax.Array,
        key: jax.Array,
    ) -> jax.Array:
        positions = jnp.arange(tokens.size)

        def add(i: jax.Array, tokens: jax.Array) -> jax.Array:
            model = state.model(graph)
            set_step(model, state.step)  # for recipes that draw in the forward pass
            known = positions < i
            logits = model(
                jnp.where(known, tokens, 0)[None],
                segment_ids=known.astype(jnp.int32)[None],
                positions=jnp.where(known, positions, 0)[None],
            )
            token = choose(logits[0, i - 1], jax.random.fold_in(key, i))
            return tokens.at[i].set(token.astype(tokens.dtype))

        end = jnp.minimum(num_prompt + num_tokens, tokens.size)
        return lax.fori_loop(num_prompt, end, add, tokens)

    return jax.jit(sample, compiler_options=compiler_options(graph))
