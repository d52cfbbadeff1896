"""Which tokens are drawn, and on what they depend."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp4jax import policies
from fp4jax.models import Transformer
from fp4jax.train import make_state
from fp4jax.train.sampling import make_sampler
from tests.cases import SMALL

PROMPT = [5, 9, 2]


@pytest.fixture(scope="module")
def model():
    return Transformer(SMALL, policies.bf16(SMALL), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def run(model):
    """The graph and the state."""
    return make_state(model, optax.sgd(0.1))


@pytest.fixture(scope="module")
def logits_of(run):
    """The logits after each of 8 tokens, which do not depend on those behind."""
    graph, state = run

    @jax.jit
    def forward(tokens):
        return nnx.merge(graph, state.params, state.held, state.rest)(tokens[None])[0]

    return lambda tokens: np.asarray(forward(jnp.array(tokens, jnp.int32)))


def draw(sampler, run, *, num_tokens=5, seed=0, length=8, behind=0):
    tokens = np.full(length, behind, np.int32)
    tokens[: len(PROMPT)] = PROMPT
    key = jax.random.key(seed)
    return sampler(run[1], tokens, len(PROMPT), num_tokens, key).tolist()


def test_greedy_takes_the_most_probable_token_of_the_text_so_far(run, logits_of):
    found = draw(make_sampler(run[0], temperature=0), run)
    logits = logits_of(found)
    for i in range(len(PROMPT), 8):
        best = logits[i - 1].max()
        # Another program rounds otherwise: bfloat16 in each of few layers.
        assert logits[i - 1, found[i]] >= best - 2**-6 * abs(best)
    assert found[:3] == PROMPT


def test_draws_depend_on_the_key_alone(run):
    sampler = make_sampler(run[0])
    first = draw(sampler, run)
    assert first == draw(sampler, run) == draw(sampler, run, behind=7)
    assert first != draw(sampler, run, seed=1)
    assert first[:5] == draw(sampler, run, num_tokens=2)[:5]
    assert sampler._cache_size() == 1


def test_one_token_to_choose_from_is_greedy(run):
    greedy = draw(make_sampler(run[0], temperature=0), run)
    assert draw(make_sampler(run[0], temperature=2.0, top_k=1), run) == greedy


def test_top_k_leaves_out_all_others(run, logits_of):
    sampler = make_sampler(run[0], temperature=100.0, top_k=2)
    best = set(np.argsort(logits_of(PROMPT + [0] * 5)[2])[-2:])
    drawn = {draw(sampler, run, num_tokens=1, seed=seed)[3] for seed in range(20)}
    assert drawn == best  # each of two is left out with probability 2^-20


def test_tokens_that_do_not_fit_are_left_out(run):
    assert len(draw(make_sampler(run[0]), run, num_tokens=99)) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be finite and not negative"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be a positive integer, got top_k=0"),
        ({"top_k": 1.5}, "top_k must be a positive integer"),
    ],
)
def test_options_out_of_range_raise(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(None, **options)
