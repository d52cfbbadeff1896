# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write your own recipe
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/fp4jax/fp4jax/blob/main/colab/write_your_own_recipe.ipynb)
#
# A recipe says how the operands of the three matrix products of a linear layer are
# rounded to four bits. Here is a new one in 30 lines, what each product then does, and
# its rank among published ones, on real text. A free CPU or T4 is enough.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fp4jax") is None:  # as on a fresh Colab machine
    source = "git+https://github.com/fp4jax/fp4jax"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import dataclasses
import functools
import itertools
import statistics
import time

import jax.numpy as jnp
from flax import nnx

import fp4jax
from fp4jax import data, models, recipes, train
from fp4jax.numerics import (
    E2M1,
    UE5M3,
    UNIFORM,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
)
from fp4jax.policies import Policy
from fp4jax.recipes import Dgrad, Fprop, Recipe, Wgrad

tiny = False  # seconds instead of ten minutes


# %% [markdown]
# ## The recipe
#
#     fprop  y  = x w        contracts the features that come in
#     dgrad  dx = dy w^T     contracts the features that go out
#     wgrad  dw = x^T dy     contracts the tokens
#
# The idea: give each product the grid that suits it. Along the tokens, gradients have
# heavy tails, so wgrad is rotated, for a uniform grid. The other two stay on E2M1, with
# square blocks for w, so that both see the same weights. Gradients are rounded
# stochastically, without bias. Change anything: what cannot work together raises, with
# a sentence that says why.


# %%
def mixed(block: int = 16) -> Recipe:
    """Returns E2M1 in fprop and dgrad, and a rotated uniform grid in wgrad."""
    two_level = {"scale": Scale(UE5M3), "tensor_scale": Fresh()}
    forward = Quantizer(E2M1, block, **two_level)
    weight = dataclasses.replace(forward, block=(block, block))
    backward = Quantizer(UNIFORM, block, rotation=Hadamard(block), **two_level)
    drawn = dataclasses.replace(backward, rounding=Stochastic())
    return Recipe(
        Fprop(x=forward, w=weight),
        Dgrad(dy=dataclasses.replace(forward, rounding=Stochastic()), w=weight),
        Wgrad(x=backward, dy=drawn),
    )


# %% [markdown]
# ## What each product does
#
# `explain` traces a model and tells, of every matrix product, how its operands are
# quantized, and which products no recipe reaches.

# %%
shape = dataclasses.replace(
    models.PRESETS["tiny"],
    num_layers=1 if tiny else 3,
    d_model=32 if tiny else 96,
    d_ff=32 if tiny else 256,
)
model = models.Transformer(shape, Policy(mixed()), rngs=nnx.Rngs(0))
fp4jax.explain(model, jnp.zeros((1, 32), jnp.int32))

# %% [markdown]
# ## The ranking
#
# All recipes train the same small language model on the same batches of the sources of
# Python's standard library. `int2`, two bits, is the control: it must lose plainly, or
# nothing was measured. Held-out loss counts, and the spread over seeds says which
# differences mean something.

# %%
candidates = {
    "bf16": recipes.bf16(),
    "e2m1_ref": recipes.e2m1_ref(),
    "ufp4": recipes.ufp4(),
    "mixed": mixed(),
    "int2": recipes.int2(),
}
if tiny:
    candidates = {name: candidates[name] for name in ("bf16", "mixed")}
steps, seeds = (2, 1) if tiny else (300, 2)
rows = data.DataConfig(
    vocab_size=shape.vocab_size,
    sequence_length=32 if tiny else 128,
    batch_size=2 if tiny else 8,
)
corpus = data.load_corpus(rows)
optimizer = train.make_optimizer(train.OptimConfig(), steps=steps)


@functools.cache
def programs(graph):
    """Returns the training step and the evaluation of a recipe, compiled once."""
    return train.make_train_step(graph, optimizer), train.make_eval_step(graph)


def heldout_loss(recipe, seed):
    """Returns the loss on held-out text after training, in nats/token."""
    model = models.Transformer(shape, Policy(recipe), rngs=nnx.Rngs(seed))
    graph, state = train.make_state(model, optimizer.transform)
    step, evaluate = programs(graph)
    batches = data.train_batches(corpus, dataclasses.replace(rows, seed=seed))
    for batch in itertools.islice(batches, steps):
        state, _ = step(state, batch)
    held = itertools.islice(data.heldout_batches(corpus, rows), 2 if tiny else None)
    found = train.evaluate(evaluate, state, held, token_bytes=corpus.token_bytes)
    return found.nats_per_token


# %%
losses = {}
for name, recipe in candidates.items():
    start = time.perf_counter()
    losses[name] = [heldout_loss(recipe, seed) for seed in range(seeds)]
    print(f"{name}: {losses[name]}, {time.perf_counter() - start:.0f} s")

# %%
print(f"{'recipe':10}{'loss':>8}{'gap to BF16, % (mean, spread)':>32}")
for name in sorted(losses, key=lambda name: statistics.mean(losses[name])):
    pairs = zip(losses[name], losses["bf16"], strict=True)
    gaps = [100 * (loss / reference - 1) for loss, reference in pairs]
    spread = f" +- {statistics.stdev(gaps):.2f}" if seeds > 1 else ""
    print(
        f"{name:10}{statistics.mean(losses[name]):8.4f}"
        f"{f'{statistics.mean(gaps):+.2f}{spread}':>32}"
    )

# %% [markdown]
# Two recipes whose gaps differ by less than their spread are not ranked: take more
# seeds and longer runs. In a checkout, the command trains the function `mixed` out of a
# file, with curves, control and checkpoints:
#
#     python -m experiments.pretrain --policies e2m1_ref,ufp4,mixed.py:mixed --seeds 3
