"""Products of small operands with float32 sums, on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels.sums import float32_sums

SHAPES = {
    "matrices": ((8, 16), (16, 12), (((1,), (0,)), ((), ()))),
    "batches": ((2, 8, 16), (2, 12, 16), (((2,), (2,)), ((0,), (0,)))),
}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_they_may_be_written_transposed(shapes, dtype):
    of_a, of_b, dimension_numbers = SHAPES[shapes]
    a, b = (
        jax.random.randint(jax.random.key(i), shape, -4, 5).astype(dtype)
        for i, shape in enumerate((of_a, of_b))
    )

    def product(a, b):
        return float32_sums(a, b, dimension_numbers=dimension_numbers).mT

    found = jax.jit(product)(a, b)
    assert found.dtype == jnp.float32
    exact = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_array_equal(found, product(*exact))
