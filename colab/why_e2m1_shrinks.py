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
# # Why E2M1 shrinks
#
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/fp4jax/fp4jax/blob/main/colab/why_e2m1_shrinks.ipynb)
#
# E2M1, the FP4 of today's GPUs, rounds to 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Where its step
# doubles, numbers are rounded down more often than up. Here is that bias seen, what it
# makes of a product and of a deep network, and why a Hadamard rotation (RHT) turns the
# order of E2M1 and of a uniform grid around, as the UFP4 paper says (arXiv 2606.20381).
# A free CPU is enough.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fp4jax") is None:  # as on a fresh Colab machine
    source = "git+https://github.com/fp4jax/fp4jax"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fp4jax
from fp4jax import stats
from fp4jax.numerics import E2M1, UNIFORM, Hadamard, Quantizer

tiny = False  # a few seconds instead of one minute
rows, width, depth = (64, 64, 2) if tiny else (2048, 1024, 24)

# %% [markdown]
# ## The bin that reaches too far up
#
# All numbers between 1.75 and 2.5 become 2: the bin reaches 0.25 down and 0.5 up. If
# they lie evenly in there, their mean is 2.125, so rounding takes 0.125 of each. At 4
# it takes 0.25. On a uniform grid, here 0 to 7, bins reach equally far both ways.

# %%
figure, axes = plt.subplots(2, 1, figsize=(9, 2.6), layout="constrained", sharex=True)
for axis, grid in zip(axes, (E2M1, UNIFORM), strict=True):
    members = np.array(grid.magnitudes) / grid.max
    edges = (members[1:] + members[:-1]) / 2
    axis.vlines(edges, 0, 1, color="gray", linewidth=0.8)
    axis.plot(members, 0.5 + 0 * members, "o")
    axis.set(yticks=[], ylabel=str(grid), ylim=(0, 1))
axes[1].set(xlabel="magnitude / largest of the block; lines: where bins end")
plt.show()

# %% [markdown]
# ## What becomes of Gaussian numbers
#
# Blocks of 16 share a scale that maps the largest of them to the largest member. The
# mean error of each bin, in units of the grid:

# %%
x = jax.random.normal(jax.random.key(0), (rows, width))


@functools.partial(jax.jit, static_argnames="quantizer")
def measure(x, quantizer):
    """Returns what a quantizer makes of an array."""
    q = fp4jax.quantize(x, quantizer)
    x_dq = fp4jax.dequantize(q)
    return {
        "alpha": stats.shrinkage(x, x_dq),
        "QSNR": stats.qsnr(x, x_dq),
        "bins": stats.bin_error(x, q),
        "geometric": stats.geometric_bias(x, q),
        "bias": stats.bias(x, q),
    }


found = {grid: measure(x, Quantizer(grid, block=16)) for grid in (E2M1, UNIFORM)}
figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
for axis, (grid, each) in zip(axes, found.items(), strict=True):
    axis.bar([f"{magnitude:g}" for magnitude in grid.magnitudes], each["bins"])
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(title=str(grid), xlabel="rounded to", ylabel="mean error")
plt.show()

# %% [markdown]
# The bins at 2 and 4 shrink as promised. Both ends matter as much: what is rounded to 0
# shrinks on every grid, and the bin at 6 expands, since a Gaussian has more numbers at
# its lower end. So a formula of the bins between the ends (*geometric*) says more than
# what is left in sum (*bias*, each number counting alike), and still less is left where
# large numbers count most: `alpha` is the part of x that is found again in its rounded
# copy, x_dq = alpha x + noise.

# %%
for grid, each in found.items():
    names = {"geometric": each["geometric"], "bias": each["bias"]}
    names["alpha - 1"] = each["alpha"] - 1
    print(f"{grid!s:8}", *(f"{name} {100 * x:+.2f}%  " for name, x in names.items()))

# %% [markdown]
# ## Products multiply it, and depth adds it up
#
# A product of two shrunk operands shrinks by about both alphas. A chain of layers keeps
# the product of all etas; real networks have norms and residual branches that rescale,
# so that this is the worst case.


# %%
@functools.partial(jax.jit, static_argnames="quantizer")
def eta(x, w, quantizer):
    """Returns by how much quantized operands scale the product of a layer."""
    x_dq, w_dq = (fp4jax.fake_quant(each, quantizer) for each in (x, w))
    return stats.gemm_shrinkage(x, w.T, x_dq, w_dq.T)


figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for grid in (E2M1, UNIFORM):
    etas = []
    for layer in range(depth):
        keys = jax.random.split(jax.random.key(layer))
        operands = (jax.random.normal(key, (min(rows, 512), width)) for key in keys)
        etas.append(eta(*operands, Quantizer(grid, block=16)))
    left = stats.cumulative_shrinkage(jnp.array(etas)).product
    axis.plot(range(1, depth + 1), 100 * (left - 1), ".-", label=str(grid))
axis.set(xlabel="layers", ylabel="change of the signal, %")
axis.legend()
plt.show()

# %% [markdown]
# ## A rotation turns the order around
#
# Activations are not Gaussian. What enters the last matrix of an MLP,
# `silu(gate) * up`, has few large numbers among many small ones. E2M1 suits that: its
# members lie close together where most numbers are. The uniform grid does not.
#
# A random Hadamard transform mixes the 16 numbers of a block, in both operands, so that
# their product stays. What comes out is nearly Gaussian, which is worse for E2M1 and
# better for the uniform grid.

# %%
gate, up = (
    jax.random.normal(key, (rows, width)) for key in jax.random.split(jax.random.key(1))
)
inputs = {
    "Gaussian": x,
    "silu(gate) * up": jax.nn.silu(2 * gate) * up,
    "a large channel in 64": x.at[:, ::64].multiply(20.0),
}
print(f"{'QSNR, dB':24}{'E2M1':>8}{'RHT':>8}{'UNIFORM':>10}{'RHT':>8}")
for name, values in inputs.items():
    qsnr = [
        float(measure(values, Quantizer(grid, 16, rotation=rotation))["QSNR"])
        for grid in (E2M1, UNIFORM)
        for rotation in (None, Hadamard(16))
    ]
    print(f"{name:24}{qsnr[0]:8.2f}{qsnr[1]:8.2f}{qsnr[2]:10.2f}{qsnr[3]:8.2f}")

# %% [markdown]
# That is the case for UFP4: rotate everything, and use a uniform grid, which the
# rotation makes the better one and which shrinks next to nothing. It is no law: where
# numbers are flatter than a Gaussian, a rotation costs the uniform grid a little.
#
# Does it hold in real training? `python -m experiments.operands` in a checkout captures
# the six operands of every layer of a model and measures exactly this:
# [its results](https://github.com/fp4jax/fp4jax/blob/main/experiments/operands/README.md).
