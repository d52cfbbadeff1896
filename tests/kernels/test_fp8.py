import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.kernels.fp8 import reference
from fp4jax.numerics import (
    E2M1,
    E8M0,
    UNIFORM,
    Quantizer,
    Scale,
    Site,
    Stochastic,
    random_bits,
)
from tests.kernels.cases import interpreter, mosaic, on_cpu, tensor

sides = pytest.mark.parametrize("side", [8, 16, 32])


@mosaic
@sides
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_amax_of_squares(side, dtype):
    from fp4jax.kernels.fp8 import mosaic

    x = tensor((64, 256), dtype).at[40, 77].set(jnp.nan)
    found = mosaic.amax(x, side, interpret=interpreter())
    np.testing.assert_array_equal(found, on_cpu(reference.amax, x, side))


@mosaic
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("side", [16, 32])
def test_a_matrix_and_its_transpose_in_e4m3(side, dtype, axis):
    from fp4jax.kernels.fp8 import mosaic

    key, x = jax.random.key(3), tensor((64, 256), dtype)
    quantizer = Quantizer(E2M1, (side, side), Scale(E8M0), rounding=Stochastic())
    powers = 2.0 ** jax.random.randint(key, (2, 64 // side, 256 // side), -3, 1)
    start = jnp.uint32(32), jnp.uint32(64)
    noise = random_bits.place(key, Site.FPROP_X.rounding_stream, start)
    how = {"axis": axis, "noise": noise}
    found = mosaic.encode(x, quantizer, powers, **how, interpret=interpreter())
    of_reference = functools.partial(reference.encode, quantizer=quantizer, axis=axis)
    expected = on_cpu(
        lambda x, powers, noise: of_reference(x, powers=powers, noise=noise),
        x,
        powers,
        noise,
    )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.float32(b))


def test_the_reference_is_that_of_operands():
    quantizer = Quantizer(UNIFORM, (16, 16), Scale(E8M0))
    x = tensor((64, 256), jnp.bfloat16)
    rows, columns = reference.encode(x, quantizer, jnp.ones((2, 4, 16)), axis=1)
    operand = fp4jax.operand(fp4jax.quantize(x, quantizer, axis=1))
    np.testing.assert_array_equal(rows, operand)
    np.testing.assert_array_equal(columns.T, operand)


@mosaic
def test_lowers_for_cuda():
    quantizer = Quantizer(UNIFORM, (32, 32), Scale(E8M0))
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)

    def call(x):
        from fp4jax.kernels.fp8 import mosaic

        return mosaic.encode(x, quantizer, jnp.ones((2, 2, 8)), axis=1)

    text = jax.jit(call).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "f8E4M3FN" in text
