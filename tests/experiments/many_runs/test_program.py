import dataclasses

import jax
import numpy as np
import pytest

from experiments.many_runs import program, text
from tests.experiments.many_runs.cases import RUN, trained


@pytest.mark.parametrize(
    ("policy", "model", "lanes"),
    [
        ("ufp4", "tiny", 2),
        ("ufp4", "tiny", 0),
        ("ue5m3", "tiny", 2),
        ("bf16", "moe_tiny", 2),
    ],
)
def test_losses_are_those_of_the_trainer(policy, model, lanes, bytes_of_two, corpus):
    run = dataclasses.replace(RUN, policy=policy, model=model)
    other = dataclasses.replace(run, lr=5e-4, seed=4, noise=6)
    runs = [other, run] if lanes else [run]
    functions, whole = program.functions(run, 257), text.read(corpus, run.length)
    start, advance = functions.start, functions.advance
    stack = lambda values: np.stack(values) if lanes else values[0]
    if lanes:
        start, advance = jax.vmap(start), jax.vmap(advance, in_axes=(0, None, 0, 0))
    advance, found = jax.jit(advance, compiler_options=functions.options), []
    state = jax.jit(start)(
        *(stack([np.uint32(getattr(r, n)) for r in runs]) for n in ("seed", "noise"))
    )
    orders = [text.orders(corpus, r.batches(bytes_of_two), steps=4) for r in runs]
    for first in range(0, run.steps, run.at_once):
        rates = stack([r.rates[first : first + run.at_once] for r in runs])
        rows = stack([next(order) for order in orders])
        state, metrics = advance(state, whole, rows, rates)
        found += np.atleast_2d(metrics["loss"])[-1].tolist()
    np.testing.assert_allclose(found, trained(run, bytes_of_two, corpus), rtol=1e-5)
