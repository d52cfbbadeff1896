"""Runs, and rows as if they had been made."""

import importlib
import math

import numpy as np
import pytest
from flax import nnx

from experiments.many_runs import text
from experiments.many_runs.found import STUDIES
from experiments.many_runs.run import Run
from experiments.many_runs.shapes import SHAPES
from experiments.scaling import fit
from fp4jax import data, models, train

RUN = Run(
    policy="bf16",
    model="tiny",
    tokens=8 * 2 * 64,
    lr=2e-3,
    seed=3,
    noise=5,
    rows=2,
    length=64,
    at_once=4,
)
studies = pytest.mark.parametrize("name", STUDIES)


def about(name):
    return importlib.import_module(f"experiments.{name}.study").STUDY


def row(run, loss=2.0, **fields):
    heldout = {"bf16": {"all": {"loss": loss}}}
    return run.piece | {"heldout": heldout, "tokens_per_s": 1.0, "diverged": 0} | fields


def made_up(run):
    """Returns a row whose loss falls with compute, higher under 4 bits."""
    shape = SHAPES[run.model]
    flops = run.tokens * models.flops_per_token(shape, sequence_length=run.length)
    rng = np.random.default_rng([run.seed, run.noise, len(run.policy)])
    loss = 2 + (flops / fit.UNIT) ** -0.2 + abs(math.log(run.lr / 2e-3)) / 10
    loss *= 1 if run.policy == "bf16" else 1.01
    loss += rng.normal(0, 1e-3)
    each = {"loss": loss, "bits_per_byte": loss}
    return run.piece | {
        "heldout": {"bf16": {"all": each, "code": each}},
        "flops": flops,
        "params": models.num_params(shape),
        "losses": [loss] * 10,
        "seconds": 30.0,
        "tokens_per_s": 1e6,
        "diverged": False,
    }


def trained(run, bytes_of_two, corpus):
    """Returns the losses of `train.make_train_step` on the trainer's own batches."""
    optimizer = train.make_optimizer(run.optim, steps=run.steps)
    rngs = nnx.Rngs(params=run.seed, quant=run.noise)
    model = models.Transformer(run.shape(257), run.whole_policy(257), rngs=rngs)
    graph, state = train.make_state(model, optimizer.transform)
    step, losses = train.make_train_step(graph, optimizer), []
    batches = data.train_batches(corpus, run.batches(bytes_of_two))
    for _ in range(run.steps):
        state, metrics = step(state, text.without_documents(next(batches)))
        losses.append(float(metrics["loss"]))
    return losses
