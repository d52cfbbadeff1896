"""FP4 tensor cores: lowered for a GPU, with values where any lowering runs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E8M0,
    UE5M3,
    UNIFORM,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
)
from fp4jax.numerics.blockwise import quantize_blocks
from fp4jax.ops import native
from tests.golden import inputs

KEY = jax.random.key(0)
E4M3_SCALE = Scale(E4M3, pad=False)
NVFP4 = Quantizer(E2M1, 16, E4M3_SCALE, Fresh())
MXFP4 = Quantizer(E2M1, 32, Scale(E8M0, "floor"))
QUANTIZERS = {
    "nvfp4": (NVFP4, NVFP4),
    "nvfp4-square": (NVFP4, Quantizer(E2M1, (16, 16), E4M3_SCALE, Fresh())),
    "nvfp4-rht-sr": (
        Quantizer(E2M1, 16, E4M3_SCALE, Fresh(), Stochastic(), Hadamard(32)),
        Quantizer(E2M1, 16, E4M3_SCALE, Fresh(), rotation=Hadamard(32)),
    ),
    "mxfp4": (MXFP4, MXFP4),
    "mxfp4-square": (MXFP4, Quantizer(E2M1, (32, 32), Scale(E8M0))),
}
# Of a and b, whether each has its contraction axis last or first of two.
AXES = {"nt": (1, 1), "nn": (1, 0), "tn": (0, 0)}
M, K, N = 24, 88, 40  # none a multiple of a block
PADDED = 96


def operands(axes, batch=()):
    shapes = ((M, K), (K, M)), ((N, K), (K, N))
    flipped = (axes[0] == 0, axes[1] == 1)
    shapes = (shapes[0][flipped[0]], shapes[1][not flipped[1]])
    return [
        jnp.asarray(inputs.matrix("heavy", "float32", (*batch, *shape), seed))
        for seed, shape in enumerate(shapes)
    ]


def both(a, b, quantizers, axes, batch=0):
    """The native product and the operands of the emulated one, moved to [..., k]."""
    axes = [axis + batch for axis in axes]
    parts = [
        quantize_blocks(
            x,
            q,
            axis=axis,
            other=2 * batch + 1 - axis if q.is_square else None,
            key=KEY,
        )
        for x, q, axis in zip((a, b), quantizers, axes, strict=True)
    ]
    y = native.matmul(*parts, quantizers=quantizers, batch=batch)
    emulated = (
        jnp.moveaxis(part.operand(jnp.float32), axis, -1)
        for part, axis in zip(parts, axes, strict=True)
    )
    return y, *emulated


CASES = [
    pytest.param(pair, axes, id=f"{name}-{layout}")
    for name, pair in QUANTIZERS.items()
    for layout, axes in AXES.items()
]


def lowered(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("quantizers, axes", CASES)
def test_lowers_for_cuda_to_one_scaled_dot_of_codes_and_scales(quantizers, axes):
    call = functools.partial(both, quantizers=quantizers, axes=axes)
    text = lowered(call, *operands(axes))
    (line,) = (line for line in text.splitlines() if "@__op$block_scaled_dot" in line)
    types = re.search(r": \((.*)\) -> tensor<(.*)>", line)
    size = quantizers[0].block_size
    scale = "f8E4M3FN" if size == 16 else "f8E8M0FNU"
    assert types[1].split(", ") == [
        f"tensor<1x{M}x{PADDED}xf4E2M1FN>",
        f"tensor<1x{N}x{PADDED}xf4E2M1FN>",
        f"tensor<1x{M}x{PADDED // size}x{scale}>",
        f"tensor<1x{N}x{PADDED // size}x{scale}>",
    ]
    assert types[2] == f"1x{M}x{N}xf32"


@functools.cache
def runs_here():
    """Whether this version of JAX has a lowering for this device."""
    code = jnp.zeros((1, 1, 16), jnp.float4_e2m1fn)
    scale = jnp.ones((1, 1, 1), jnp.float8_e4m3fn)
    try:
        jax.jit(jax.nn.scaled_matmul).trace(code, code, scale, scale).lower()
    except NotImplementedError:
        return False
    return True


@pytest.fixture
def runs():
    if not runs_here():
        pytest.skip("jax.nn.scaled_matmul has no lowering for this device")


@pytest.mark.parametrize("quantizers, axes", CASES)
def test_values_equal_the_product_of_operands(runs, quantizers, axes):
    call = jax.jit(functools.partial(both, quantizers=quantizers, axes=axes))
    y, a, b = call(*operands(axes))
    assert y.shape == (M, N) and y.dtype == jnp.float32
    exact = np.float64(a) @ np.float64(b).T
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-square"])
def test_batch_dimensions_are_flattened(runs, name):
    a, b = operands((1, 0), (3,))
    call = functools.partial(both, quantizers=QUANTIZERS[name], axes=(1, 0), batch=1)
    y, a_values, b_values = jax.jit(call)(a, b)
    exact = np.einsum("bmk,bnk->bmn", np.float64(a_values), np.float64(b_values))
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def lanes(name):
    """A product for each of three lanes, its second operand in common."""
    a, b = operands((1, 0), (3,))
    call = functools.partial(both, quantizers=QUANTIZERS[name], axes=(1, 0))
    return jax.vmap(call, in_axes=(0, None)), a, b[0]


def test_lanes_lower_to_one_batched_scaled_dot():
    text = lowered(*lanes("nvfp4"))
    assert text.count("custom_call @__op$block_scaled_dot") == 1
    assert f"tensor<3x{N}x{PADDED}xf4E2M1FN>" in text


def test_lanes_equal_calls_of_their_own(runs):
    call, a, b = lanes("nvfp4-square")
    single = functools.partial(both, quantizers=QUANTIZERS["nvfp4-square"], axes=(1, 0))
    y = jax.jit(call)(a, b)[0]
    for i in range(3):
        np.testing.assert_allclose(y[i], jax.jit(single)(a[i], b)[0], rtol=1e-6)


def test_a_nan_block_reaches_the_result(runs):
    a, b = operands((1, 0))
    pair = (Quantizer(E2M1, 16, E4M3_SCALE),) * 2
    y, *_ = jax.jit(functools.partial(both, quantizers=pair, axes=(1, 0)))(
        a.at[3, 5].set(jnp.nan), b
    )
    assert np.isnan(y[3]).all() and not np.isnan(np.delete(y, 3, 0)).any()


def three_gemms(recipe):
    """y, dx and dw, and operands of shapes that no block divides."""

    def call(x, w, dy):
        dot = functools.partial(
            fp4jax.dot_general,
            dimension_numbers=(((2,), (0,)), ((), ())),
            recipe=recipe,
            key=KEY,
        )
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(dy)

    shapes = (2, 12, 88), (88, 5, 8), (2, 12, 5, 8)
    return call, *(jax.random.normal(KEY, shape) for shape in shapes)


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(native, "check_device", lambda: None)


RECIPES = {"nvfp4": recipes.nvfp4(), "mxfp4": recipes.mxfp4()}


@pytest.mark.parametrize("name", RECIPES)
def test_all_three_gemms_of_a_recipe_lower_to_scaled_dots(any_device, name):
    recipe = dataclasses.replace(RECIPES[name], compute="native")
    text = lowered(*three_gemms(recipe))
    assert text.count("custom_call @__op$block_scaled_dot") == 3
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_values_of_the_emulation(any_device, runs, name):
    call, *args = three_gemms(dataclasses.replace(RECIPES[name], compute="native"))
    emulation, *_ = three_gemms(RECIPES[name])
    for ours, emulated in zip(
        jax.jit(call)(*args), jax.jit(emulation)(*args), strict=True
    ):
        bound = 1e-5 * np.abs(emulated).max()
        np.testing.assert_allclose(ours, emulated, rtol=0, atol=bound)


def test_a_recipe_raises_on_a_device_without_the_tensor_cores(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("9.0")])
    call, *args = three_gemms(dataclasses.replace(recipes.nvfp4(), compute="native"))
    with pytest.raises(NotImplementedError, match="compute='native' cannot run: "):
        jax.jit(call)(*args)


@pytest.mark.parametrize(
    "a, b, message",
    [
        (Quantizer(UNIFORM, 16, E4M3_SCALE), NVFP4, "grid=UNIFORM, scale=E4M3"),
        (NVFP4, Quantizer(E2M1, 16), "scale=F32, block=16"),
        (NVFP4, Quantizer(E2M1, 16, Scale(UE5M3)), "scale=UE5M3, block=16"),
        (Quantizer(E2M1, (32, 32), E4M3_SCALE), NVFP4, r"scale=E4M3, block=\(32, 32\)"),
        (Quantizer(E2M1, 16, Scale(E8M0)), MXFP4, "scale=E8M0, block=16"),
        (NVFP4, MXFP4, "one scale format for both operands.*got E4M3 and E8M0"),
    ],
    ids=["grid", "f32", "ue5m3", "e4m3-32", "e8m0-16", "mixed"],
)
def test_what_the_hardware_does_not_multiply_raises(a, b, message):
    with pytest.raises(ValueError, match=f"compute='native' must have .*{message}"):
        native.check_quantizers(a, b)


class Device:
    platform, device_kind = "gpu", "a device"

    def __init__(self, capability):
        if capability is not None:
            self.compute_capability = capability


@pytest.mark.parametrize("capability", [None, "9.0", "8.9", "gfx942"])
def test_a_device_without_the_tensor_cores_raises(monkeypatch, capability):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(capability)])
    message = r"'native' cannot run: .* 10\.0 or later, got 'a device'\. Use comp"
    with pytest.raises(NotImplementedError, match=message):
        native.check_device()


@pytest.mark.parametrize("capability", ["10.0", "12.1"])
def test_a_device_with_the_tensor_cores_passes(monkeypatch, capability):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(capability)])
    native.check_device()
