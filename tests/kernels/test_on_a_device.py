"""What only real kernels can show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.grouped_matmul import Hopper
from fp4jax.kernels.quantize import MOSAIC, XLA, Output
from fp4jax.kernels.tile import Tile
from fp4jax.numerics.groups import Groups
from fp4jax.ops.grouped_matmul import SCAN, weights
from fp4jax.ops.grouped_matmul import rows as rows_of
from tests.kernels import test_amax, test_both
from tests.kernels.cases import QUANTIZERS, asked, parts, tensor
from tests.kernels.test_quantize import check

WHY = devices.without_mosaic()
on_a_device = pytest.mark.skipif(WHY is not None, reason=WHY or "")
WITHOUT_WGMMA = devices.without_wgmma()
UNEVEN = np.random.default_rng(0).multinomial(500, np.ones(64) / 64)


@on_a_device
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", ["uniform-rht-sr", "nvfp4-square", "ti2d-sr"])
def test_a_hundred_runs_give_one_result(name, axis):
    quantizer, x = QUANTIZERS[name], tensor((2, 512, 512), jnp.bfloat16)
    amax = {"amax": jnp.float32(4)} if quantizer.tensor_scale else {}
    way, inputs = asked(quantizer, axis, **amax)
    run = jax.jit(lambda x: parts(MOSAIC.quantize(x, way, inputs)))
    first, *others = (jax.device_get(run(x)) for _ in range(100))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@on_a_device
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", ["uniform", "ue5m3", "nvfp4-rht", "uniform-rht64"])
def test_codes_that_are_written_alone_equal_the_reference(name, axis):
    quantizer, shape = QUANTIZERS[name], (2, 512, 1024)
    x = tensor(shape, jnp.bfloat16)
    if quantizer.rotation is None:
        x = x * jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)
        x = x.at[0, 32:64].set(0)
    check(MOSAIC, x, quantizer, axis, (Output.CODES, Output.SCALES))


@on_a_device
@pytest.mark.parametrize("name", ["ufp4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(1024, 3584), (4, 96, 1280)], ids=str)
def test_many_tiles_both_ways_equal_the_reference(name, shape):
    test_both.check(MOSAIC, tensor(shape, jnp.bfloat16), name)


@on_a_device
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name, rows", [("uniform-rht-sr", 16), ("mxfp4-floor-sr", 32)])
def test_many_tiles_of_tokens_equal_the_reference(name, rows, axis):
    x = tensor((256, rows, 1024), jnp.bfloat16)
    tokens = jax.random.bits(jax.random.key(1), x.shape[:2])
    check(MOSAIC, x, QUANTIZERS[name], axis, tokens=tokens)


@on_a_device
@pytest.mark.parametrize("shape", [(2048, 16, 1024), (256, 64, 768)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4-rht", "drawn-signs"])
def test_amaxes_of_many_entries_equal_the_reference(name, shape):
    test_amax.check_entries(MOSAIC, shape, jnp.bfloat16, name)


@on_a_device
def test_groups_have_the_amaxes_of_their_entries():
    of = np.random.default_rng(2).integers(0, 65, 2048)  # the last is none
    groups = Groups(jnp.asarray(np.where(of == 5, 6, of), jnp.int32), 64)
    x = tensor((2048, 16, 1024), jnp.bfloat16) * 2.0 ** (groups.of % 8)[:, None, None]
    function = functools.partial(test_amax.amax_of, groups=groups)
    x, quantizer = x.astype(jnp.bfloat16), QUANTIZERS["nvfp4-rht"]
    found = jax.jit(lambda x: function(x, quantizer))(x)
    with KERNELS(Kernels(quantize=XLA)):
        expected = jax.jit(lambda x: function(x, quantizer))(x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.skipif(WITHOUT_WGMMA is not None, reason=WITHOUT_WGMMA or "")
@pytest.mark.parametrize(
    "rows, tile",
    [
        (16, Tile()),
        (16, Tile(peers=1)),
        (64, Tile(n=128, k=128, stages=3)),
        (128, Tile()),
    ],
)
def test_grouped_products_equal_a_scan(rows, tile):
    of = jnp.asarray(np.random.default_rng(1).permutation(np.repeat(range(64), UNEVEN)))
    groups = Groups(jnp.append(of, jnp.full(9, 64)).astype(jnp.int32), 64)
    draw = lambda i, *shape: jax.random.randint(jax.random.key(i), shape, -3, 4)
    x = draw(0, groups.of.size, rows, 512).astype(jnp.bfloat16)
    dy = draw(1, groups.of.size, rows, 768).astype(jnp.bfloat16)
    w = draw(2, 64, 512, 768).astype(jnp.bfloat16)
    kernels = Hopper(tile=tile).products
    factors = tuple(jax.random.normal(jax.random.key(3), (2, 64)))

    def by(products, x, w, dy):
        how = {"precision": None, "factors": factors}
        with KERNELS(Kernels(products=products)):
            return (
                rows_of(x, w, groups, axis=1, precision=None),
                rows_of(dy, w, groups, axis=2, **how),
                weights(x, dy, groups, **how),
            )

    @jax.jit
    def both(*operands):
        return by(kernels, *operands), by(SCAN, *operands)

    for _ in range(5):  # sums are exact
        jax.tree.map(np.testing.assert_array_equal, *jax.device_get(both(x, w, dy)))
