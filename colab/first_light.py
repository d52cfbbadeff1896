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
# # First light: four bits, from one number to a training run
#
# Run it from a checkout after `python -m pip install -e .`; a CPU is enough.
#
# 1. What a 4-bit grid can say, and what a block scale adds.
# 2. Why a Hadamard rotation helps the uniform grid.
# 3. A small language model, trained in BF16 and with the `ufp4` recipe.

# %%
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import fp4jax
from fp4jax import data, models, policies, recipes, train
from fp4jax.numerics import E2M1, UNIFORM, FixedSigns, Hadamard, Quantizer

tiny = False  # a few seconds instead of a few minutes

# %% [markdown]
# ## Grids
#
# Both grids have 15 members. E2M1 spaces them as a floating-point format does, the
# uniform grid evenly. A block of 16 numbers shares one scale, chosen so that the
# largest of them meets the largest member.

# %%
figure, axes = plt.subplots(figsize=(8, 1.6), layout="constrained")
for level, grid in enumerate((E2M1, UNIFORM)):
    members = np.array(grid.magnitudes) / grid.max
    axes.plot([*-members, *members], [level] * 2 * len(members), "|", markersize=16)
axes.set(yticks=[0, 1], yticklabels=["E2M1", "uniform"], ylim=(-0.6, 1.6))
axes.set(xlabel="value / largest value of the block")
plt.show()

# %%
x = jax.random.normal(jax.random.key(0), (4096, 64))
q = fp4jax.quantize(x, Quantizer(E2M1, block=16), axis=-1)
print("codes ", q.codes.shape, q.codes.dtype, q.codes[0, :8])
print("scales", q.scales.shape, q.scales.dtype, q.scales[0])
print("x     ", x[0, :8])
print("x_dq  ", fp4jax.dequantize(q)[0, :8])


# %% [markdown]
# ## Rotation
#
# On Gaussian numbers the uniform grid is the better one, but an outlier in a block
# leaves its neighbors few members to use. A Hadamard transform of the block spreads
# the outlier over all of them; both operands of a GEMM are rotated alike, so that
# their product stays.


# %%
def error(x, quantizer):
    """Returns the root mean square error, relative to that of x."""
    return float(
        jnp.linalg.norm(fp4jax.fake_quant(x, quantizer) - x) / jnp.linalg.norm(x)
    )


outliers = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.05, x.shape), 8 * x, x)
rotation = Hadamard(16, FixedSigns(0))
for name, values in (("Gaussian", x), ("with outliers", outliers)):
    print(f"{name}:")
    for grid in (E2M1, UNIFORM):
        plain, rotated = (
            error(values, Quantizer(grid, rotation=r)) for r in (None, rotation)
        )
        print(f"  {grid!s:8} plain {plain:.3f}  rotated {rotated:.3f}")

# %% [markdown]
# ## Training
#
# A recipe says how the two operands of each of the three GEMMs of a linear layer are
# quantized; a policy says which layers take it. Here are the quantizers of `ufp4`: all
# operands are rotated, and the gradient dy is rounded stochastically.

# %%
recipe = recipes.ufp4()
for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
    for operand, quantizer in vars(gemm).items():
        parts = quantizer.grid, quantizer.block, quantizer.rounding, quantizer.rotation
        print(f"{type(gemm).__name__:6}{operand:3}", *parts)

# %% [markdown]
# The text is the source code of Python's standard library, cut into tokens by a
# byte-pair encoding that is trained on the spot. Both runs start from the same weights
# and see the same batches.

# %%
steps = 4 if tiny else 150
config = models.PRESETS["tiny"]
data_config = data.DataConfig(vocab_size=config.vocab_size)
if tiny:
    config = dataclasses.replace(config, num_layers=1, d_model=32, d_ff=32)
    data_config = dataclasses.replace(data_config, sequence_length=32, batch_size=2)
corpus = data.load_corpus(data_config)


# %%
def losses(policy):
    """Returns the loss of every step."""
    model = models.Transformer(config, policy, rngs=nnx.Rngs(0))
    optimizer = train.make_optimizer(train.OptimConfig(), steps=steps)
    graph, state = train.make_state(model, optimizer.transform)
    step = train.make_train_step(graph, optimizer)
    batches = itertools.islice(data.train_batches(corpus, data_config), steps)
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return np.array(found)


curves = {"bf16": losses(policies.bf16(config)), "ufp4": losses(policies.ufp4(config))}

# %%
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, curve in curves.items():
    axes.plot(range(1, steps + 1), curve, label=name, linewidth=1)
axes.set(xlabel="step", ylabel="training loss, nats/token")
axes.legend()
plt.show()

# %% [markdown]
# To measure the gap on held-out text, over several seeds and beside other recipes, use
# the command:
#
#     python -m experiments.pretrain --policies e2m1_ref,ufp4 --seeds 3
