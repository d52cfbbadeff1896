"""What the tests of kernels share."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.fp8 import reference
from fp4jax.kernels.quantize import (
    INTERPRETED,
    MOSAIC,
    TRITON,
    Inputs,
    Output,
    Quantized,
    Way,
)
from fp4jax.kernels.quantize.backends import XLA, Mosaic, Triton, Xla
from fp4jax.numerics import (
    E2M1,
    E2M1_TO_2,
    E4M3,
    E8M0,
    UE5M3,
    UNIFORM,
    Fresh,
    Hadamard,
    MSEden,
    Quantizer,
    Scale,
    Site,
    Stochastic,
)
from fp4jax.numerics.hadamard import PerStepSigns

several_devices = pytest.mark.skipif(
    jax.device_count() < 8, reason="meshes are of eight devices"
)
mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="kernels need JAX 0.11"
)
# Triton has an interpreter for a whole process: see test_triton.
in_triton = pytest.mark.skipif(
    devices.without_triton() is not None and "TRITON_INTERPRET" not in os.environ,
    reason="Triton kernels need a GPU or their interpreter",
)
# Kernels that can run here, where need be interpreted.
RUNNING = INTERPRETED if devices.without_mosaic() else MOSAIC
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(RUNNING, marks=mosaic),
        pytest.param(
            Triton(90) if devices.without_triton() else TRITON, marks=in_triton
        ),
    ],
    ids=["mosaic", "triton"],
)

QUANTIZERS = {
    "uniform": Quantizer(grid=UNIFORM),
    "uniform-rht-sr": recipes.ufp4().wgrad.dy,
    "uniform-rht64": Quantizer(grid=UNIFORM, rotation=Hadamard(64)),
    "uniform-drawn-signs": Quantizer(
        grid=UNIFORM, rotation=Hadamard(16, PerStepSigns())
    ),
    "to-2-rht-sr": Quantizer(E2M1_TO_2, rotation=Hadamard(16), rounding=Stochastic()),
    "nvfp4-rht": recipes.nvfp4().wgrad.x,
    "nvfp4-square": recipes.nvfp4().fprop.w,
    "nvfp4-sr-pad": Quantizer(
        E2M1, 16, Scale(E4M3), tensor_scale=Fresh(), rounding=Stochastic()
    ),
    "ue5m3": Quantizer(E2M1, 16, Scale(UE5M3), tensor_scale=Fresh()),
    "mxfp4-floor-sr": Quantizer(
        E2M1, 32, Scale(E8M0, rule="floor", prescale=0.75), rounding=Stochastic()
    ),
    "ti2d-sr": recipes.ti2d().dgrad.dy,
    "mxfp8": recipes.mxfp8().fprop.x,
}


class Opaque(Xla):
    """The reference as a kernel would be called, with a tile that shapes do not fit."""

    is_opaque = reads_once = True

    def why_not(self, x, way):
        quantizer = way.quantizer
        if quantizer.scale.candidates or isinstance(quantizer.rounding, MSEden):
            return "kernels know nothing of it"
        return None

    def multiples(self, shape, way):
        last = len(shape) - 1
        padded = last if way.axis < last else last - 1
        return {padded: 32 if padded == way.other else 20} if last else {}


class Fitting(Opaque):
    """The same with a tile of one element."""

    def multiples(self, shape, way):
        return {}


OPAQUE, FITTING = Opaque(), Fitting()


class Divisible(Mosaic):
    """References as kernels whose work a rule divides, as where GPUs run them."""

    is_divisible = True

    def quantize(self, x, way, inputs):
        return XLA.quantize(x, way, inputs)

    def quantize_all(self, x, ways):
        return XLA.quantize_all(x, ways)


def divisible(monkeypatch):
    """Returns that backend, with the references of kernels for FP8."""
    from fp4jax.kernels.fp8 import mosaic

    for name in ("amax", "encode"):
        plain = getattr(reference, name)
        call = lambda *args, plain=plain, interpret, **how: plain(*args, **how)
        monkeypatch.setattr(mosaic, name, call)
    return Divisible(interpreted=True)


def how(quantizer, axis):
    """The arguments of a call, of a part of a [2, ...] array."""
    return {
        "outputs": tuple(Output),
        "axis": axis,
        "other": (1 if axis == 2 else 2) if quantizer.is_square else None,
        "key": jax.random.key(5),
        "start": (jnp.uint32(7), jnp.uint32(64)),
        "site": Site.WGRAD_DY,
    }


def asked(quantizer, axis, **further):
    """The same as a way and its inputs."""
    given = how(quantizer, axis) | further
    names = "outputs", "axis", "other", "site"
    way = Way(quantizer, **{name: given.pop(name) for name in names})
    return way, Inputs(**given)


# Those of [2, 64, ...], from anywhere; beyond 2^31 where no row is.
TOKENS = np.random.default_rng(7).permutation(1000)[:128].astype(np.uint32)
TOKENS = jnp.asarray(TOKENS | (TOKENS % 9 == 0) * np.uint32(2**31)).reshape(2, 64)


def interpreter():
    """Of kernels, where no device runs them; None where one does."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams() if devices.without_mosaic() else None


def on_cpu(function, *args):
    """Calls a function on the CPU, whose results are those that count."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return function(*jax.device_put(args, cpu))


def tensor(shape, dtype):
    """Values of which sums of 128 are exact, and some to spoil."""
    sizes, signs = jax.random.split(jax.random.key(0))
    x = 2.0 ** jax.random.randint(sizes, shape, -4, 4)
    return (x * jax.random.rademacher(signs, shape)).astype(dtype)


def parts(quantized: Quantized):
    """A result as a tree."""
    return quantized.arrays, quantized.tensor_scale, quantized.signs


def assert_equal(found, expected):
    """Asserts that all of two results is the same bit for bit."""
    assert found.arrays.keys() == expected.arrays.keys()
    found, expected = jax.device_get((parts(found), parts(expected)))
    same = jax.tree.map(
        lambda a, b: (
            a.shape == b.shape
            and a.dtype == b.dtype
            and np.array_equal(a, b, equal_nan=a.dtype != jnp.uint8)
        ),
        found,
        expected,
    )
    assert jax.tree.all(same), same
