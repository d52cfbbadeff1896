import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import (
    INTERPRETED,
    MOSAIC,
    Output,
    Quantized,
    api,
    quantize,
    reference,
)
from tests.kernels.cases import (
    QUANTIZERS,
    assert_equal,
    how,
    mosaic,
    on_cpu,
    parts,
    tensor,
)

quantizers = pytest.mark.parametrize("name", QUANTIZERS)
axes = pytest.mark.parametrize("axis", [1, 2], ids=["columns", "rows"])
dtypes = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])


def by_kernels(backend, x, quantizer, **how):
    """What kernels make of an array, and of its amax."""
    names = ("axis", "key", "site")
    if quantizer.tensor_scale is not None:
        how["amax"] = backend.amax(x, quantizer, **{name: how[name] for name in names})
    return backend.quantize(x, quantizer, **how)


def check(x, quantizer, axis, outputs=tuple(Output)):
    """Compares a kernel with the reference, interpreted where no device runs it."""
    backend = INTERPRETED if devices.without_mosaic() else MOSAIC

    def call(x):
        keywords = how(quantizer, axis) | {"outputs": outputs}
        return parts(by_kernels(backend, x, quantizer, **keywords))

    found = Quantized(*(call if backend.interpreted else jax.jit(call))(x))
    expected = on_cpu(
        lambda x: reference.quantize(x, quantizer, **how(quantizer, axis)), x
    )
    arrays = {output: expected.arrays[output] for output in outputs}
    expected = dataclasses.replace(expected, arrays=arrays)
    assert_equal(found, expected)


@mosaic
@pytest.mark.parametrize(
    "name, axis", [("uniform-rht-sr", 1), ("nvfp4-rht", 2), ("ti2d-sr", 2)]
)
def test_the_kernel_equals_the_reference(name, axis):
    check(tensor((2, 64, 128), jnp.bfloat16), QUANTIZERS[name], axis)


@mosaic
@quantizers
@axes
@dtypes
def test_every_kernel_equals_the_reference(name, axis, dtype):
    check(tensor((2, 64, 128), dtype), QUANTIZERS[name], axis)


@mosaic
@quantizers
@axes
def test_shapes_are_padded_to_what_the_kernel_takes(name, axis):
    quantizer, x = QUANTIZERS[name], tensor((2, 40, 72), jnp.bfloat16)
    how_ = how(quantizer, axis)
    sizes = {"axis": axis, "other": how_["other"]}
    assert INTERPRETED.why_not(x, quantizer, **sizes) is None
    with KERNELS(Kernels(quantize=INTERPRETED)):
        padded = quantize(x, quantizer, **how_)
    assert_equal(padded, reference.quantize(x, quantizer, **how_))


@mosaic
@pytest.mark.parametrize("value", [jnp.nan, 0.0, 1e-40, 3e38])
@pytest.mark.parametrize("name", ["uniform-rht-sr", "nvfp4-square", "ti2d-sr"])
def test_edge_values(name, value):
    x = tensor((2, 64, 128), jnp.float32).at[1, :16, 3].set(value)
    # A CPU gives NaNs signs, which no code of a NaN block should tell.
    is_loose = devices.without_mosaic() and jnp.isnan(value)
    outputs = [o for o in Output if o != Output.CODES or not is_loose]
    x = x.at[0].set(value if value == 0 else x[0])
    check(x, QUANTIZERS[name], 2, outputs)


@mosaic
@pytest.mark.parametrize("name, axis", [("uniform-rht-sr", 2), ("nvfp4-square", 1)])
def test_lowers_for_cuda(name, axis):
    quantizer = QUANTIZERS[name]
    call = functools.partial(
        by_kernels, MOSAIC, quantizer=quantizer, **how(quantizer, axis)
    )
    x = jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16)
    arrays = jax.jit(lambda x: call(x).arrays[Output.OPERAND])
    text = arrays.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    "shape, axis, name, complaint",
    [
        ((4, 24), 1, "uniform", "axis 1 must be a multiple of 16"),
        ((4, 64), 1, "uniform", "a multiple of 128 runs"),
        ((64, 24), 0, "uniform", "a multiple of 128 runs"),
        ((48, 256), 1, "ti2d-sr", r"must be multiples of (32, 128)"),
    ],
)
@mosaic
def test_says_what_it_cannot_do(shape, axis, name, complaint):
    from fp4jax.kernels.quantize import mosaic

    quantizer = QUANTIZERS[name]
    other = 1 - axis if quantizer.is_square else None
    x = jnp.zeros(shape, jnp.bfloat16)
    assert complaint in mosaic.unsupported(x, quantizer, axis=axis, other=other)


@mosaic
def test_recipes_beyond_it_are_named():
    from fp4jax.kernels.quantize import mosaic

    x = jnp.zeros((256, 256), jnp.bfloat16)
    four_over_six = recipes.four_over_six().fprop.x
    eden = recipes.quartet2().wgrad.dy
    half = x.astype(jnp.float16)
    assert "candidate" in mosaic.unsupported(x, four_over_six, axis=1)
    assert "MSEden" in mosaic.unsupported(x, eden, axis=1)
    assert "float16" in mosaic.unsupported(half, QUANTIZERS["uniform"], axis=1)


no_kernel = pytest.mark.skipif(not devices.without_mosaic(), reason="it runs here")


@no_kernel
def test_a_named_implementation_never_falls_back():
    x, quantizer = jnp.ones((256, 256)), QUANTIZERS["uniform"]
    with pytest.raises(NotImplementedError, match="'mosaic' cannot do this: .* got"):
        quantize(x, quantizer, outputs=[], axis=1, implementation="mosaic")
    with pytest.raises(ValueError, match="one of mosaic, xla or None"):
        quantize(x, quantizer, outputs=[], axis=1, implementation="triton")


@no_kernel
def test_chooses_what_runs_here_and_says_why(caplog):
    x = tensor((2, 64, 128), jnp.bfloat16)
    quantizer = QUANTIZERS["uniform"]
    api._say.cache_clear()  # products of other tests may have said it
    with caplog.at_level("INFO"):
        chosen = quantize(x, quantizer, **how(quantizer, 2))
    assert_equal(chosen, reference.quantize(x, quantizer, **how(quantizer, 2)))
    assert "quantize runs in XLA: " in caplog.text
