"""Triton kernels without a GPU: as PTX, as calls of JAX, and interpreted."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import MOSAIC, TRITON, Output, Way, api
from fp4jax.kernels.quantize.backends import Triton
from fp4jax.numerics import E2M1, Hadamard, Quantizer
from tests.kernels.cases import QUANTIZERS, asked

triton = pytest.importorskip("triton", reason="Triton is among the extras of GPUs")
INTERPRETS = "TRITON_INTERPRET" in os.environ
compiles = pytest.mark.skipif(INTERPRETS, reason="what is interpreted is not compiled")
quantizers = pytest.mark.parametrize("name", QUANTIZERS)
axes = pytest.mark.parametrize("axis", [1, 2], ids=["columns", "rows"])
capabilities = pytest.mark.parametrize("capability", [80, 90])


def call(backend, quantizer, axis, x):
    """All that a kernel makes of an array, of an amax of its own."""
    way, inputs = asked(quantizer, axis)
    if quantizer.tensor_scale is not None:
        inputs = dataclasses.replace(inputs, amax=backend.amax(x, way, inputs.key))
    return backend.quantize(x, way, inputs).arrays


def compiled(kernel, arrays, out_types, capability, constants):
    """Returns the PTX of a kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"bfloat16": "bf16", "float32": "fp32", "uint32": "u32", "int32": "i32"}
    of = [*arrays, *out_types]
    kinds = ["*" + kinds.get(str(a.dtype), "u8") for a in of]
    signature = dict(zip(kernel.arg_names, kinds, strict=False))
    source = ASTSource(
        kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(of))},
    )
    options = {"enable_fp_fusion": False}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Returns what returns the PTX of all kernels of a quantization."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return functools.partial(_programs, monkeypatch)


def _programs(monkeypatch, name, axis, dtype, capability):
    from fp4jax.kernels.amax import triton as amax
    from fp4jax.kernels.quantize import triton as quantize

    found = []

    def launch(kernel, *arrays, out_types, programs, capability, **constants):
        found.append(compiled(kernel, arrays, out_types, capability, constants))
        return [jnp.zeros(t.shape, t.dtype) for t in out_types]

    for module in (quantize, amax):
        monkeypatch.setattr(module, "launch", launch)
    backend, x = Triton(capability), jax.ShapeDtypeStruct((2, 64, 128), dtype)
    jax.eval_shape(functools.partial(call, backend, QUANTIZERS[name], axis), x)
    return found


# Sums and products that are not rounded each, or not to nearest, or that flush.
INEXACT = r"fma\S*|\S+\.ftz\S*|(?:div|rcp|sqrt)\.(?!rn)\S+|(?:add|sub|mul)\.f\S+"


@compiles
@pytest.mark.parametrize(
    "name, axis, capability", [("nvfp4-rht", 1, 80), ("uniform-rht-sr", 2, 90)]
)
def test_ptx_rounds_every_operation(programs, name, axis, capability):
    kernels = programs(name, axis, jnp.bfloat16, capability)
    assert len(kernels) == (2 if name == "nvfp4-rht" else 1)
    for ptx in kernels:
        assert f".target sm_{capability}" in ptx and "mul.rn.f32" in ptx
        assert not re.findall(INEXACT, ptx)


@compiles
@capabilities
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@axes
@quantizers
def test_all_ptx_rounds_every_operation(programs, name, axis, dtype, capability):
    for ptx in programs(name, axis, dtype, capability):
        assert "mul.rn.f32" in ptx and not re.findall(INEXACT, ptx)


def test_what_is_inexact_is_found():
    for operation in (
        "fma.rn.f32",
        "mul.f32",
        "add.rn.ftz.f32",
        "div.full.f32",
        "rcp.approx.f32",
    ):
        assert re.findall(INEXACT, f"\t{operation} \t%r1, %r2, %r3;")
    for operation in ("add.rn.f32", "div.rn.f32", "add.s32", "mul.lo.s32", "sub.s32"):
        assert not re.findall(INEXACT, f"\t{operation} \t%r1, %r2, %r3;")


@compiles
@pytest.mark.parametrize("name, axis", [("uniform-rht-sr", 2), ("nvfp4-rht", 1)])
def test_lowers_for_cuda(name, axis):
    pytest.importorskip("jax_triton", exc_type=ImportError)
    if not hasattr(pytest.importorskip("jaxlib.gpu_triton"), "TritonKernel"):
        pytest.skip("JAX needs its plugin for GPUs")
    backend, x = Triton(90), jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16)

    def operand(x):
        return call(backend, QUANTIZERS[name], axis, x)[Output.OPERAND]

    text = jax.jit(operand).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    kernels = 2 if name == "nvfp4-rht" else 1
    assert text.count("triton_kernel_call") == kernels


@compiles
def test_gradients_of_lanes_call_kernels():
    pytest.importorskip("jax_triton", exc_type=ImportError)
    key, recipe = jax.random.key(0), recipes.nvfp4()

    def loss(x, w):
        y = fp4jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe, key=key)
        return jnp.sum(jnp.square(y))

    gradients = jax.vmap(jax.grad(jax.checkpoint(loss), (0, 1)), (0, None))
    with KERNELS(Kernels(quantize=Triton(90))):
        program = jax.make_jaxpr(gradients)(jnp.ones((2, 32, 64)), jnp.ones((64, 32)))
    text = str(program)
    # In both passes, the forward one twice, and both amaxes of what is rotated.
    assert text.count("triton_kernel_call[") >= 8
    assert "amax_of_tile" in text and "quantize_tile" in text


def interpreted(*arguments):
    """Runs the tests of kernels that Triton interprets; returns how many passed."""
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "0"]
    command += ["-q", "-k", "triton"]
    environment = {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others may warn of xdist
    names = "test_quantize.py", "test_amax.py"
    tests = [str(Path(__file__).with_name(name)) for name in names]
    run = subprocess.run(
        [*command, *arguments, *tests],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " skipped" not in run.stdout
    return int(re.findall(r"(\d+) passed", run.stdout)[0])


@compiles
def test_interpreted_kernels_equal_the_reference():
    assert interpreted() == 3


@compiles
def test_all_interpreted_kernels_equal_the_reference():
    assert interpreted("-m", "breadth") > 80


@compiles
@pytest.mark.parametrize(
    "shape, axis, name, complaint",
    [
        ((4, 24), 1, "odd", "a run must be of .* got 24"),
        ((4, 256), 1, "long", "a run must be of .* got 256"),
        ((4, 64, 64), 0, "ti2d-sr", "the last two axes, got 0, 1"),
    ],
)
def test_says_what_it_cannot_do(shape, axis, name, complaint):
    others = {
        "odd": Quantizer(E2M1, 24),
        "long": Quantizer(E2M1, 16, rotation=Hadamard(256)),
    }
    quantizer = (QUANTIZERS | others)[name]
    other = axis + 1 if quantizer.is_square else None
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    way = Way(quantizer, (), axis, other)
    assert re.search(complaint, Triton(80).why_not(x, way))


class Gpu:
    """A device of some compute capability."""

    platform, device_kind = "gpu", "NVIDIA some"

    def __init__(self, capability):
        self.compute_capability = capability


def test_needs_a_gpu_and_its_library(monkeypatch):
    monkeypatch.setattr(devices, "default", lambda: Gpu("7.5"))
    assert "capability 8.0 or later" in devices.without_triton()
    monkeypatch.setattr(devices, "default", lambda: Gpu("8.6"))
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    assert "jax-triton must be installed" in devices.without_triton()
    monkeypatch.setitem(sys.modules, "jax_triton", triton)
    assert devices.without_triton() is None


def test_is_taken_where_mosaic_is_not(monkeypatch):
    way, x = Way(QUANTIZERS["uniform"], (), 1), jnp.ones((256, 256))
    monkeypatch.setitem(sys.modules, "jax_triton", triton)
    monkeypatch.setattr(devices, "too_old", lambda: None)
    found = []
    for capability in ("7.5", "8.9", "9.0"):
        monkeypatch.setattr(devices, "default", lambda c=capability: Gpu(c))
        found.append(api._backend(x, way))
    assert found == [None, TRITON, MOSAIC]
    with pytest.raises(NotImplementedError, match="'mosaic' cannot do this: .* 9.0"):
        monkeypatch.setattr(devices, "default", lambda: Gpu("8.0"))
        api._backend(x, way, "mosaic")
