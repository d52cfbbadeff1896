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
# # Train your own Flax model in four bits
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/fp4jax/fp4jax/blob/main/colab/train_in_fp4.ipynb)
#
# A small language model as its author might have written it, without a thought of
# quantization, is trained on real text in BF16 and with three 4-bit recipes. One line
# injects a recipe. A free CPU or T4 is enough: the numerics are emulated.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fp4jax") is None:  # as on a fresh Colab machine
    source = "git+https://github.com/fp4jax/fp4jax"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import time
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import fp4jax.nnx
from fp4jax import recipes

tiny = False  # a minute instead of a few

# %% [markdown]
# ## The model
#
# Nothing here knows of fp4jax.


# %%
class Block(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, *, width, depth, context, rngs):
        self.embed = nnx.Embed(128, width, rngs=rngs)
        self.position = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


# %% [markdown]
# ## The text
#
# The sources of Python's standard library, as ASCII characters.

# %%
steps, batch_size, context, width, depth = (
    (3, 2, 32, 32, 1) if tiny else (300, 16, 64, 128, 2)
)
files = sorted(Path(importlib.util.__file__).parents[1].glob("*.py"))
files = files[:9] if tiny else files
text = "".join(path.read_text(errors="ignore") for path in files)
tokens = np.array([ord(c) for c in text if ord(c) < 128], np.int32)
train, heldout = tokens[: -len(tokens) // 20], tokens[-len(tokens) // 20 :]
print(f"{len(train):,} characters to train on, {len(heldout):,} held out")


def batches(data, count, seed):
    """Yields windows of the text, one character longer than the context."""
    starts = np.random.default_rng(seed).integers(
        len(data) - context - 1, size=(count, batch_size, 1)
    )
    yield from data[starts + np.arange(context + 1)]


# %% [markdown]
# ## One line
#
# `quantize_model` finds the linear layers, the projections of attention among them, and
# gives each the recipe. `explain` tells what every matrix product of the model now does
# in the forward pass (fprop) and in the two of the backward pass (dgrad, wgrad), and
# which products no recipe reaches: those inside attention, and the tied output head.


# %%
def make_model(recipe):
    model = GPT(width=width, depth=depth, context=context, rngs=nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(1))  # the line
    return model


fp4jax.explain(make_model(recipes.ufp4()), jnp.zeros((1, context), jnp.int32))

# %% [markdown]
# ## Training
#
# `set_step` gives each step noise of its own; `fp4jax.nnx.value_and_grad` is
# `nnx.value_and_grad` that also keeps the held scales of recipes such as `ue5m3`.


# %%
def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, step, batch):
    fp4jax.nnx.set_step(model, step)
    loss, grads = fp4jax.nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model, batch):
    return loss_fn(model, batch)


def run(recipe):
    """Returns the loss of every step and the mean loss of held-out text."""
    model = make_model(recipe)
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    losses = [
        train_step(model, optimizer, step, jnp.asarray(batch))
        for step, batch in enumerate(batches(train, steps, seed=0))
    ]
    held = [evaluate(model, jnp.asarray(b)) for b in batches(heldout, 20, seed=1)]
    return np.array(losses), float(np.mean(held))


results = {}
chosen = {
    "bf16": recipes.bf16(),
    "ufp4": recipes.ufp4(),
    "nvfp4": recipes.nvfp4(),
    "ti2d": recipes.ti2d(block=16),
}
for name in ("bf16", "ufp4") if tiny else chosen:
    start = time.perf_counter()
    results[name] = run(chosen[name])
    seconds = time.perf_counter() - start
    gap = 100 * (results[name][1] / results.get("bf16", results[name])[1] - 1)
    print(
        f"{name:8} held-out {results[name][1]:.4f} nats ({gap:+.2f}%), {seconds:.0f} s"
    )

# %% [markdown]
# One seed of a small model: differences of a percent are noise. What shows is that all
# of them learn, and that four bits cost little here.

# %%
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, (losses, _) in results.items():
    smooth = np.convolve(losses, np.ones(10) / 10, "valid") if steps > 10 else losses
    axes.plot(smooth, label=name, linewidth=1)
axes.set(xlabel="step", ylabel="training loss, nats/character")
axes.legend()
plt.show()
