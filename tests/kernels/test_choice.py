"""The choice of kernels."""

import jax.numpy as jnp
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.kernels import quantize, scaled_matmul
from fp4jax.kernels.choice import KERNELS, Kernels


@pytest.mark.parametrize(
    "choice, complaint",
    [
        ({"quantize": "mosaic"}, "quantize must be a backend .* got quantize='mosaic'"),
        (
            {"quantize": scaled_matmul.MOSAIC},
            "backend of fp4jax.kernels.quantize, such",
        ),
        ({"quantize": type(quantize.XLA)}, "quantize must be a backend"),
        ({"scaled_matmul": quantize.XLA}, "backend of fp4jax.kernels.scaled_matmul"),
        ({"exchange": "dense"}, "exchange, such as its DENSE or RAGGED, or None"),
        ({"products": "hopper"}, "products must be Products, .* got products='hopper'"),
    ],
)
def test_what_is_no_kernel_is_refused(choice, complaint):
    with pytest.raises(TypeError, match=complaint):
        Kernels(**choice)


def test_what_is_no_choice_is_refused():
    x, dims = jnp.ones((32, 32)), (((1,), (0,)), ((), ()))
    complaint = r"entered with Kernels\(...\), got KERNELS\('xla'\)"
    with KERNELS("xla"), pytest.raises(TypeError, match=complaint):
        fp4jax.dot_general(x, x, dims, recipe=recipes.ti2d())
