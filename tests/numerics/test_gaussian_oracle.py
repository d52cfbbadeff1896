"""Shrinkage and noise on Gaussian data against published and measured figures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E8M0,
    UNIFORM,
    Fresh,
    Quantizer,
    Scale,
    Stochastic,
)

MX_FLOOR = {"block": 32, "scale": Scale(E8M0, rule="floor")}
SR = {"rounding": Stochastic()}


def two_level(pad=None):
    return {"scale": Scale(E4M3, pad=pad), "tensor_scale": Fresh(448.0)}


@pytest.fixture(scope="module")
def gaussian():
    x = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    return x, jnp.asarray(x)


@pytest.mark.parametrize(
    ("quantizer", "shrinkage", "qsnr"),
    [
        pytest.param(Quantizer(E2M1), -0.406, 20.52, id="e2m1"),
        pytest.param(Quantizer(UNIFORM), 0.063, 21.39, id="uniform"),
        pytest.param(Quantizer(E2M1, **two_level()), -0.44, 20.43, id="nvfp4"),
        pytest.param(Quantizer(E2M1, **MX_FLOOR), -1.97, 18.78, id="mxfp4"),
        pytest.param(Quantizer(E2M1, **SR), 0.0, 17.49, id="e2m1-sr"),
        pytest.param(Quantizer(UNIFORM, **SR), 0.0, 18.38, id="uniform-sr"),
        pytest.param(Quantizer(E2M1, **two_level(), **SR), 0.0, None, id="padded-sr"),
        pytest.param(
            Quantizer(E2M1, **two_level(pad=False), **SR), -0.35, None, id="unpadded-sr"
        ),
        pytest.param(Quantizer(E2M1, **MX_FLOOR, **SR), -1.05, None, id="mxfp4-sr"),
    ],
)
def test_gaussian_figures(gaussian, quantizer, shrinkage, qsnr):
    """alpha - 1 = <q, x> / |x|^2 - 1 in percent, and -10 log10(|q - x|^2 / |x|^2)."""
    x, device_x = gaussian
    # The standard error of alpha - 1 over 4M samples is at most 0.008 points.
    fake_quant = jax.jit(fp4jax.fake_quant, static_argnums=1)
    error = np.asarray(fake_quant(device_x, quantizer, key=jax.random.key(0))) - x
    power = np.sum(x * x, dtype=np.float64)
    assert abs(100 * np.sum(error * x, dtype=np.float64) / power - shrinkage) < 0.03
    if qsnr is not None:
        noise = np.sum(error * error, dtype=np.float64)
        assert abs(-10 * np.log10(noise / power) - qsnr) < 0.05
