import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import (
    INTERPRETED,
    MOSAIC,
    XLA,
    Output,
    Quantized,
    Way,
    api,
    quantize,
    reference,
)
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    F32,
    INT2,
    UE5M3_FN,
    UNIFORM,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
)
from fp4jax.numerics.groups import Groups
from tests.kernels.cases import (
    OPAQUE,
    QUANTIZERS,
    TOKENS,
    asked,
    assert_equal,
    backends,
    how,
    mosaic,
    on_cpu,
    parts,
    tensor,
)

quantizers = pytest.mark.parametrize("name", QUANTIZERS)
axes = pytest.mark.parametrize("axis", [1, 2], ids=["columns", "rows"])
dtypes = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])


def by_kernels(backend, x, way, inputs):
    """What kernels make of an array, and of its amax."""
    if way.quantizer.tensor_scale is not None and inputs.amax is None:
        amax = backend.amax(x, way, inputs.key)
        inputs = dataclasses.replace(inputs, amax=amax)
    return backend.quantize(x, way, inputs)


def check(backend, x, quantizer, axis, outputs=tuple(Output), **further):
    """Compares a kernel with the reference."""
    of_kernel = asked(quantizer, axis, **further, outputs=outputs)

    def call(x):
        return parts(by_kernels(backend, x, *of_kernel))

    found = Quantized(*(call if backend == INTERPRETED else jax.jit(call))(x))
    of_all = asked(quantizer, axis, **further)
    expected = on_cpu(lambda x: XLA.quantize(x, *of_all), x)
    arrays = {output: expected.arrays[output] for output in outputs}
    expected = dataclasses.replace(expected, arrays=arrays)
    assert_equal(found, expected)


@backends
@pytest.mark.parametrize(
    "name, axis", [("uniform-rht-sr", 1), ("nvfp4-rht", 2), ("ti2d-sr", 2)]
)
def test_the_kernel_equals_the_reference(name, axis, backend):
    check(backend, tensor((2, 64, 128), jnp.bfloat16), QUANTIZERS[name], axis)


@backends
def test_signs_are_float32_where_numbers_are_float64(backend):
    with jax.enable_x64(True):
        x = tensor((1, 64, 128), jnp.bfloat16)
        check(backend, x, QUANTIZERS["uniform-rht-sr"], 1)


@backends
@quantizers
@axes
@dtypes
def test_every_kernel_equals_the_reference(name, axis, dtype, backend):
    check(backend, tensor((2, 64, 128), dtype), QUANTIZERS[name], axis)


tokens = pytest.mark.parametrize("name", [n for n in QUANTIZERS if n.endswith("-sr")])


@backends
@tokens
@axes
def test_rows_draw_as_their_tokens_do(name, axis, backend):
    x, quantizer = tensor((2, 32, 128), jnp.bfloat16), QUANTIZERS[name]
    check(backend, x, quantizer, axis, tokens=TOKENS[:, :32])


@backends
@pytest.mark.parametrize("name", [n for n in QUANTIZERS if "nvfp4" in n])
@axes
def test_entries_have_tensor_scales_of_their_own(name, axis, backend):
    x, quantizer = tensor((2, 64, 128), jnp.bfloat16), QUANTIZERS[name]
    further = {"tokens": TOKENS} if quantizer.is_stochastic else {}
    check(backend, x, quantizer, axis, **further, amax=jnp.float32([16, 90]))


# Of formats, rules and sizes that no recipe has.
FURTHER = {
    "int2-even-sr": Quantizer(INT2, 8, Scale(E8M0, rule="even"), rounding=Stochastic()),
    "e5m2": Quantizer(E5M2, 32, Scale(F32)),
    "e5m2-sr": Quantizer(E5M2, 32, Scale(E8M0), rounding=Stochastic()),
    "e4m3-rht32-sr": Quantizer(
        E4M3, 16, Scale(E8M0), rotation=Hadamard(32), rounding=Stochastic()
    ),
    "ue5m3-fn-rht128": Quantizer(
        E2M1, 16, Scale(UE5M3_FN), tensor_scale=Fresh(), rotation=Hadamard(128)
    ),
    "e4m3-scale-rht64-sr": Quantizer(
        E2M1, 16, Scale(E4M3), rotation=Hadamard(64), rounding=Stochastic()
    ),
    "squares-of-8": Quantizer(UNIFORM, (8, 8), Scale(E8M0)),
}


@backends
@pytest.mark.parametrize("name", FURTHER)
@axes
def test_magnitudes_of_every_size(name, axis, backend):
    if backend == INTERPRETED:
        pytest.skip("interpreted it takes minutes")
    quantizer, shape = FURTHER[name], (2, 128, 128)
    values, sizes = jax.random.split(jax.random.key(3))
    of_blocks = 2.0 ** jax.random.randint(sizes, (2, 16, 16), -60, 60)
    of_elements = jnp.repeat(jnp.repeat(of_blocks, 8, 1), 8, 2)
    x = jax.random.normal(values, shape) * of_elements
    if quantizer.tensor_scale is None:
        x = x.at[0, 40:43, 60].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
    x = x.at[1, :64, :64].set(0.0).at[1, 3, 5].set(-1e-40)
    check(backend, x, quantizer, axis)


@backends
@quantizers
@axes
def test_shapes_are_padded_to_what_the_kernel_takes(name, axis, backend):
    quantizer, x = QUANTIZERS[name], tensor((2, 40, 72), jnp.bfloat16)
    way, inputs = asked(quantizer, axis)
    assert backend.why_not(x, way) is None
    with KERNELS(Kernels(quantize=backend)):
        padded = quantize(x, quantizer, **how(quantizer, axis))
    assert_equal(padded, reference.quantize(x, way, inputs))


@backends
@pytest.mark.parametrize("value", [jnp.nan, 0.0, 1e-40, 3e38])
@pytest.mark.parametrize("name", ["uniform-rht-sr", "nvfp4-square", "ti2d-sr"])
def test_edge_values(name, value, backend):
    x = tensor((2, 64, 128), jnp.float32).at[1, :16, 3].set(value)
    # A CPU gives NaNs signs, which no code of a NaN block should tell.
    is_loose = backend == INTERPRETED and jnp.isnan(value)
    outputs = [o for o in Output if o != Output.CODES or not is_loose]
    x = x.at[0].set(value if value == 0 else x[0])
    check(backend, x, QUANTIZERS[name], 2, outputs)


@mosaic
@pytest.mark.parametrize("name, axis", [("uniform-rht-sr", 2), ("nvfp4-square", 1)])
def test_lowers_for_cuda(name, axis):
    way, inputs = asked(QUANTIZERS[name], axis)
    x = jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16)
    arrays = jax.jit(
        lambda x: by_kernels(MOSAIC, x, way, inputs).arrays[Output.OPERAND]
    )
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
    assert complaint in mosaic.unsupported(x, Way(quantizer, (), axis, other))


@mosaic
def test_recipes_beyond_it_are_named():
    from fp4jax.kernels.quantize import mosaic

    x = jnp.zeros((256, 256), jnp.bfloat16)
    four_over_six = recipes.four_over_six().fprop.x
    eden = recipes.quartet2().wgrad.dy
    half = x.astype(jnp.float16)

    def why(x, quantizer):
        return mosaic.unsupported(x, Way(quantizer, (), 1))

    assert "candidate" in why(x, four_over_six)
    assert "MSEden" in why(x, eden)
    assert "float16" in why(half, QUANTIZERS["uniform"])


no_kernel = pytest.mark.skipif(not devices.without_mosaic(), reason="it runs here")


@no_kernel
def test_a_named_implementation_never_falls_back():
    x, quantizer = jnp.ones((256, 256)), QUANTIZERS["uniform"]
    for name in ("mosaic", "triton"):
        complaint = f"'{name}' cannot do this: .* got .* implementation='xla'"
        with pytest.raises(NotImplementedError, match=complaint):
            quantize(x, quantizer, outputs=[], axis=1, implementation=name)
    with pytest.raises(ValueError, match="one of mosaic, triton, xla or None"):
        quantize(x, quantizer, outputs=[], axis=1, implementation="cuda")


@pytest.mark.parametrize(
    "name, change, complaint",
    [
        ("uniform-rht-sr", {"key": None}, "key must be a PRNG key"),
        ("uniform", {"other": 0}, "other must be None unless blocks are squares"),
        ("uniform", {"axis": 2}, "axis must"),
        ("uniform", {"amax": 1.0}, "amax must be None unless"),
        ("uniform", {"outputs": "codes"}, "outputs must be a sequence of operand, co"),
        ("uniform", {"outputs": [3]}, "outputs must be a sequence"),
    ],
)
def test_arguments_are_checked_whoever_quantizes(name, change, complaint):
    arguments = {"outputs": [Output.CODES], "axis": 1, "key": jax.random.key(0)}
    with KERNELS(Kernels(quantize=OPAQUE)), pytest.raises(ValueError, match=complaint):
        quantize(jnp.ones((32, 64)), QUANTIZERS[name], **arguments | change)


def test_axes_may_be_negative_or_left_out_whoever_quantizes():
    x, quantizer = tensor((32, 64), jnp.float32), QUANTIZERS["nvfp4-square"]
    expected = quantize(x, quantizer, outputs=[Output.SCALES], axis=1, other=0)
    with KERNELS(Kernels(quantize=OPAQUE)):
        found = quantize(x, quantizer, outputs=[Output.SCALES], axis=-1)
    assert found.arrays[Output.SCALES].shape == (2, 4)
    assert_equal(found, expected)


def test_groups_that_draw_by_where_they_stand_are_left_to_xla_and_said(caplog):
    x, quantizer = tensor((4, 16, 64), jnp.bfloat16), QUANTIZERS["nvfp4-sr-pad"]
    way, inputs = asked(quantizer, 2, groups=Groups(jnp.array([0, 1, 1, 0]), 2))
    api._say.cache_clear()  # products of other tests may have said it
    with caplog.at_level("INFO"), KERNELS(Kernels(quantize=OPAQUE)):
        found = api.quantize_blocks(x, way, inputs)
    expected = reference.quantize_blocks(x, way, inputs)
    np.testing.assert_array_equal(found.values, expected.values)
    assert "groups whose rows draw by where they stand may go in" in caplog.text


@no_kernel
def test_chooses_what_runs_here_and_says_why(caplog):
    x = tensor((2, 64, 128), jnp.bfloat16)
    quantizer = QUANTIZERS["uniform"]
    api._say.cache_clear()  # products of other tests may have said it
    with caplog.at_level("INFO"):
        chosen = quantize(x, quantizer, **how(quantizer, 2))
    assert_equal(chosen, reference.quantize(x, *asked(quantizer, 2)))
    assert "quantize runs in XLA: " in caplog.text
