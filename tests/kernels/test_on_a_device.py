"""What only real kernels can show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels import devices
from fp4jax.kernels.quantize import MOSAIC
from tests.kernels.cases import QUANTIZERS, how, parts, tensor
from tests.kernels.test_quantize import check

WHY = devices.without_mosaic()
on_a_device = pytest.mark.skipif(WHY is not None, reason=WHY or "")


@on_a_device
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", ["uniform-rht-sr", "nvfp4-square", "ti2d-sr"])
def test_a_hundred_runs_give_one_result(name, axis):
    quantizer, x = QUANTIZERS[name], tensor((2, 512, 512), jnp.bfloat16)
    amax = {"amax": jnp.float32(4)} if quantizer.tensor_scale else {}
    call = functools.partial(
        MOSAIC.quantize, quantizer=quantizer, **how(quantizer, axis), **amax
    )
    run = jax.jit(lambda x: parts(call(x)))
    first, *others = (jax.device_get(run(x)) for _ in range(100))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@on_a_device
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name, rows", [("uniform-rht-sr", 16), ("mxfp4-floor-sr", 32)])
def test_many_tiles_of_tokens_equal_the_reference(name, rows, axis):
    x = tensor((256, rows, 1024), jnp.bfloat16)
    tokens = jax.random.bits(jax.random.key(1), x.shape[:2])
    check(MOSAIC, x, QUANTIZERS[name], axis, tokens=tokens)
