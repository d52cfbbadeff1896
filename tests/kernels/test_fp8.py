import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels.quantize import Output, reference
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
    blocks = np.asarray(x, np.float32).reshape(64 // side, side, 256 // side, side)
    np.testing.assert_array_equal(found, np.abs(blocks).max((1, 3)))


def encoded(x, quantizer, axis, powers, key):
    from fp4jax.kernels.fp8 import mosaic

    noise = None
    if quantizer.is_stochastic:
        noise = random_bits.place(key, Site.FPROP_X.rounding_stream, None)
    how = {"axis": axis, "noise": noise, "interpret": interpreter()}
    return mosaic.encode(x, quantizer, powers, **how)


@mosaic
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("side", [16, 32])
def test_a_matrix_and_its_transpose_in_e4m3(side, dtype, axis):
    key, x = jax.random.key(3), tensor((64, 256), dtype)
    quantizer = Quantizer(E2M1, (side, side), Scale(E8M0), rounding=Stochastic())
    powers = 2.0 ** jax.random.randint(key, (2, 64 // side, 256 // side), -3, 1)
    rows, columns = encoded(x, quantizer, axis, powers, key)
    how = {"outputs": [Output.OPERAND], "axis": axis, "other": 1 - axis}
    operand = on_cpu(
        lambda x, key: reference.quantize(x, quantizer, key=key, **how), x, key
    ).arrays[Output.OPERAND]
    of_elements = np.kron(powers, np.ones((side, side), np.float32))
    assert rows.dtype == columns.dtype == jnp.float8_e4m3fn
    expected = np.asarray(operand, np.float32) * of_elements
    np.testing.assert_array_equal(np.asarray(rows, np.float32), expected[0])
    np.testing.assert_array_equal(np.asarray(columns, np.float32), expected[1].T)


@mosaic
def test_lowers_for_cuda():
    quantizer = Quantizer(UNIFORM, (32, 32), Scale(E8M0))
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)

    def call(x):
        from fp4jax.kernels.fp8 import mosaic

        return mosaic.encode(x, quantizer, jnp.ones((2, 2, 8)), axis=1)

    text = jax.jit(call).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "f8E4M3FN" in text
