import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels import planes
from fp4jax.kernels.quantize import Inputs, Output, Way, reference
from fp4jax.numerics import E2M1, E4M3, UNIFORM, Quantizer, Scale, hadamard
from tests.kernels.cases import QUANTIZERS, tensor


def as_planes(x, size):
    return list(jnp.moveaxis(x.reshape(-1, size), -1, 0))


@pytest.mark.parametrize("size", [2, 16])
def test_rotation_equals_the_reference(size):
    x = tensor((8, 2 * size), jnp.float32)
    signs = hadamard.sign_vector(hadamard.Hadamard(size), None, 0)
    rotated = planes.rotate(as_planes(x, 2 * size), [float(s) for s in signs])
    expected = hadamard.rotate(x, signs, 1)
    np.testing.assert_array_equal(jnp.stack(rotated, -1), expected)


@pytest.mark.parametrize("name", ["uniform", "mxfp8"])
def test_values_codes_and_scales_equal_the_reference(name):
    quantizer = QUANTIZERS[name]
    size = quantizer.block_size
    x = tensor((8, 2 * size), jnp.bfloat16)
    quantized = planes.quantize(
        as_planes(x.astype(jnp.float32), size), quantizer, size=quantizer.block_size
    )
    way = Way(quantizer, tuple(Output), 1)
    expected = reference.quantize(x, way, Inputs()).arrays
    operand = jnp.stack(planes.operand(quantized, jnp.bfloat16), -1)
    np.testing.assert_array_equal(operand.reshape(x.shape), expected[Output.OPERAND])
    codes = jnp.stack(planes.packed(quantized, quantizer, 8), -1)
    np.testing.assert_array_equal(codes.reshape(8, -1), expected[Output.CODES])
    scales = jnp.stack(planes.scale_codes(quantized, quantizer), -1)
    np.testing.assert_array_equal(scales.reshape(8, -1), expected[Output.SCALES])


def test_codes_fill_an_integer_from_below():
    quantizer = Quantizer(UNIFORM, 8, Scale())
    run = [jnp.float32([v]) for v in (1, -1, 0, 7, 2, 3, -7, 5)]
    (word,) = planes.packed(planes.quantize(run, quantizer, size=8), quantizer, 32)
    assert f"{int(word[0]) & 0xFFFFFFFF:08x}" == "5f327091"


def test_a_run_may_hold_several_blocks():
    quantizer = Quantizer(E2M1, 16, Scale(E4M3), rotation=hadamard.Hadamard(32))
    x = tensor((4, 32), jnp.float32)
    signs = hadamard.sign_vector(quantizer.rotation, None, 8)
    quantized = planes.quantize(
        as_planes(x, 32), quantizer, size=16, signs=[float(s) for s in signs]
    )
    assert len(quantized.values) == 32
    assert len(quantized.scales) == 2
    way = Way(quantizer, (Output.SCALES,), 1)
    expected = reference.quantize(x, way, Inputs())
    scales = jnp.stack(planes.scale_codes(quantized, quantizer), -1)
    np.testing.assert_array_equal(scales, expected.arrays[Output.SCALES])
