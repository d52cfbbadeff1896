"""Quantizers that tests of this folder share, by name, and one program for them all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import fp4jax
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    F32,
    INT2,
    NVFP4_SIGNS,
    UE5M3,
    UE5M3_FN,
    UNIFORM,
    FixedSigns,
    Fresh,
    Hadamard,
    PerStepSigns,
    Quantizer,
    Scale,
    Stochastic,
)

SCALES = {
    "f32": Scale(F32),
    "e4m3": Scale(E4M3),
    "ue5m3": Scale(UE5M3),
    "ue5m3_fn": Scale(UE5M3_FN),
    "e8m0": Scale(E8M0),
    "floor": Scale(E8M0, "floor"),
    "even": Scale(E8M0, "even"),
}


def quantizer(grid, scale, block=16, target=None, **options):
    tensor_scale = None if target is None else Fresh(target)
    return Quantizer(
        grid, block=block, scale=SCALES[scale], tensor_scale=tensor_scale, **options
    )


# Rounded to nearest.
ROWS = {
    "e2m1-f32": quantizer(E2M1, "f32"),
    "uniform-f32": quantizer(UNIFORM, "f32"),
    "int2-f32": quantizer(INT2, "f32", block=8),
    "e2m1-e4m3": quantizer(E2M1, "e4m3"),
    "uniform-ue5m3": quantizer(UNIFORM, "ue5m3"),
    "e2m1-ue5m3_fn": quantizer(E2M1, "ue5m3_fn", block=24),
    "e2m1-floor": quantizer(E2M1, "floor", block=32),
    "uniform-even": quantizer(UNIFORM, "even"),
    "int2-even": quantizer(INT2, "even", block=32),
    "uniform-e8m0": quantizer(UNIFORM, "e8m0", block=32),
    "e4m3-e8m0": quantizer(E4M3, "e8m0", block=32),
    "e5m2-floor": quantizer(E5M2, "floor", block=32),
    "nvfp4": quantizer(E2M1, "e4m3", target=448.0),
    "uniform-ue5m3-two": quantizer(UNIFORM, "ue5m3", target=2048.0),
    "e4m3-ue5m3_fn-two": quantizer(E4M3, "ue5m3_fn", block=1, target=114688.0),
}
SQUARES = {
    "uniform-f32-square": quantizer(UNIFORM, "f32", block=(8, 8)),
    "e2m1-e8m0-square": quantizer(E2M1, "e8m0", block=(32, 32)),
    "nvfp4-square": quantizer(E2M1, "e4m3", block=(16, 16), target=448.0),
}
NVFP4 = ROWS["nvfp4"]
ROTATED = {
    "uniform-f32-rht16": quantizer(
        UNIFORM, "f32", rotation=Hadamard(16, PerStepSigns())
    ),
    "nvfp4-rht16": quantizer(
        E2M1, "e4m3", target=448.0, rotation=Hadamard(16, NVFP4_SIGNS)
    ),
    "uniform-e8m0-rht64": quantizer(
        UNIFORM, "e8m0", rotation=Hadamard(64, FixedSigns(3))
    ),
    "e2m1-ue5m3-rht256": quantizer(
        E2M1, "ue5m3", block=12, target=448.0, rotation=Hadamard(256)
    ),
}
STOCHASTIC = {
    f"{name}-sr": dataclasses.replace(
        (ROWS | SQUARES | ROTATED)[name], rounding=Stochastic()
    )
    for name in (
        "uniform-f32",
        "int2-f32",
        "e4m3-e8m0",
        "nvfp4",
        "nvfp4-square",
        "uniform-f32-rht16",
    )
}
ALL = ROWS | SQUARES | ROTATED | STOCHASTIC

# One of each kind, where a program for each would take long.
FEW = {
    name: ALL[name] for name in ("e2m1-e4m3", "nvfp4-square-sr", "uniform-f32-rht16-sr")
}

KEY = jax.random.key(0)


def quantize_all(quantizers, x, *, key=KEY, **options):
    """QTensors by name, for tracing in one program."""
    return {
        name: fp4jax.quantize(x, quantizer, key=key, **options)
        for name, quantizer in quantizers.items()
    }


def dequantize_all(qtensors):
    return {name: fp4jax.dequantize(q) for name, q in qtensors.items()}


@jax.jit
def _everything(x, key):
    qtensors = quantize_all(ALL, x, key=key)
    return qtensors, dequantize_all(qtensors)


def everything(x, key=KEY):
    """QTensors of all quantizers, and their values; one program for each shape."""
    return _everything(x, key)


def normal(shape, dtype="float32", seed=0):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(x, dtype)


def assert_same(actual, expected):
    """Bit for bit, in every leaf of two trees of one structure."""
    paths = jax.tree.leaves_with_path(expected)
    for (path, b), a in zip(paths, jax.tree.leaves(actual), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


def magnitudes(codes, grid):
    """Magnitudes of element codes, by numpy."""
    return np.array(grid.magnitudes)[np.asarray(codes) & (1 << grid.magnitude_bits) - 1]


def spread(scales, q):
    """Block scales or the like, repeated for every element of `q.codes`."""
    scales = np.asarray(scales, np.float64)
    for axis in {q.axis, q.other} - {None}:
        scales = scales.repeat(q.quantizer.block_size, axis)
    return scales[tuple(slice(n) for n in q.codes.shape)]
