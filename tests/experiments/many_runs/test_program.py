import dataclasses

import jax
import numpy as np
import pytest

from experiments.many_runs import program, text
from tests.experiments.many_runs.cases import RUN, trained


@pytest.mark.parametrize(
    ("policy", "model"),
    [("ufp4", "tiny"), ("ue5m3", "tiny"), ("bf16", "moe_tiny")],
)
def test_losses_are_those_of_the_trainer(policy, model, bytes_of_two, corpus):
    run = dataclasses.replace(RUN, policy=policy, model=model)
    functions, whole = program.functions(run, 257), text.read(corpus, run.length)
    state = jax.jit(functions.start)(np.uint32(run.seed), np.uint32(run.noise))
    advance = jax.jit(functions.advance, compiler_options=functions.options)
    orders, found = text.orders(corpus, run.batches(bytes_of_two), steps=4), []
    for rates in np.split(run.rates, run.steps // run.at_once):
        state, metrics = advance(state, whole, next(orders), rates)
        found += metrics["loss"].tolist()
    np.testing.assert_allclose(found, trained(run, bytes_of_two, corpus), rtol=1e-5)
