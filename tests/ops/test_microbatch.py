"""Parts of a batch get the random bits, and so the numbers, of the whole batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import Fresh, Site, Stochastic
from fp4jax.numerics.blockwise import quantize_blocks
from fp4jax.ops.dot_general import pack_x

KEY = jax.random.key(0)
PARTS, M, K, N = 3, 32, 16, 48


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


X, W, DY = normal(1, (PARTS * M, K)), normal(2, (K, N)), normal(3, (PARTS * M, N))
# Stochastic in every operand of every GEMM, in squares, and in rows.
RECIPES = {
    "squares": recipes.ti2d(block=16, sr_all=True),
    "rows": recipes.mxfp4(),
    "rotated": recipes.ufp4(),
    "packed": dataclasses.replace(
        recipes.ti2d(block=16, sr_all=True), residuals="packed"
    ),
}


@functools.partial(jax.jit, static_argnames=("recipe", "spec", "weight"))
def value_and_grads(x, w, dy, microbatch, *, recipe, spec, weight="rhs"):
    def product(x, w):
        return fp4jax.einsum(
            spec,
            *((x, w) if weight == "rhs" else (w, x)),
            recipe=recipe,
            key=KEY,
            weight=weight,
            microbatch=microbatch,
            preferred_element_type=jnp.float32,
        )

    y, vjp = jax.vjp(product, x, w.astype(jnp.float32))
    return y, *vjp(dy.astype(y.dtype))


def check_parts(recipe, spec, x, dy, *, axis=0, weight="rhs"):
    """Compares the parts of x and dy, along the first axis and `axis`, to the whole."""
    run = functools.partial(value_and_grads, recipe=recipe, spec=spec, weight=weight)
    whole = run(x, W, dy, None)
    pairs = zip(
        np.split(x, PARTS), np.split(np.asarray(dy), PARTS, axis=axis), strict=True
    )
    parts = [run(a, W, b, jnp.int32(i)) for i, (a, b) in enumerate(pairs)]
    y, dx, dw = zip(*parts, strict=True)
    # Terms of a sum are equal, and at most 8; float32 sums of up to 96 of them differ
    # by 96 units of 2^-24 of the sum of their magnitudes. One random bit more or less
    # changes a term by a step of its grid, an eighth of the largest of its block.
    close = functools.partial(np.testing.assert_allclose, rtol=0)
    close(np.concatenate(y, axis), whole[0], atol=96 * 2**-24 * 8 * K)
    # dx arrives in bfloat16: sums that differ may round to neighbours.
    np.testing.assert_allclose(
        np.concatenate(dx).astype(np.float32), whole[1].astype(jnp.float32), rtol=2**-7
    )
    close(sum(dw), whole[2], atol=96 * 2**-24 * 8 * PARTS * M)


@pytest.mark.parametrize("name", RECIPES)
def test_parts_are_those_of_the_whole(name):
    check_parts(RECIPES[name], "mk,kn->mn", X, DY)


def test_rows_of_several_dimensions_and_w_first():
    recipe = RECIPES["squares"]
    x, dy = X.reshape(2 * PARTS, -1, K), DY.reshape(2 * PARTS, -1, N)
    check_parts(recipe, "btk,kn->btn", x, dy)
    check_parts(recipe, "kn,btk->nbt", x, jnp.moveaxis(dy, -1, 0), axis=1, weight="lhs")


def test_without_an_index_every_part_draws_the_same():
    recipe, x = RECIPES["squares"], jnp.tile(X[:M], (2, 1))
    run = functools.partial(value_and_grads, recipe=recipe, spec="mk,kn->mn")
    dy = DY[: 2 * M]
    halves = [run(x[:M], W, dy[:M], i)[0] for i in (None, 0, 1)]
    assert (halves[0] == halves[1]).all()
    assert (halves[0] != halves[2]).mean() > 0.9


@pytest.mark.parametrize("axis", [0, 1], ids=["free", "contraction"])
@pytest.mark.parametrize("name", ["stochastic", "eden"])
def test_a_part_of_an_array_has_its_random_bits(axis, name):
    eden = recipes.quartet2().dgrad.dy
    quantizer = {"stochastic": recipes.mxfp4().dgrad.dy, "eden": eden}[name]
    x = jax.random.normal(jax.random.key(4), (256, 256))
    quantize = functools.partial(
        quantize_blocks,
        quantizer=quantizer,
        axis=1,
        key=KEY,
        amax=jnp.max(jnp.abs(x)) if isinstance(quantizer.tensor_scale, Fresh) else None,
        site=Site.DGRAD_DY,
    )
    whole = quantize(x).dequantized()
    start = [jnp.uint32(128 * (i == axis)) for i in range(2)]
    part = quantize(jnp.split(x, 2, axis)[1], start=tuple(start)).dequantized()
    np.testing.assert_array_equal(part, jnp.split(whole, 2, axis)[1])


def test_a_packed_x_that_draws_knows_its_part():
    recipe = RECIPES["packed"]
    packed = [pack_x(X[M:], recipe=recipe, key=KEY)]
    packed += [
        pack_x(X[M : 2 * M], recipe=recipe, key=KEY, microbatch=i) for i in (0, 1)
    ]
    whole = pack_x(X, recipe=recipe, key=KEY).codes
    axis = packed[1].blocked_axes[0]
    first, second = (p.codes for p in packed[1:])
    half = jax.lax.slice_in_dim(whole, M // 2, M, axis=axis)  # two codes a byte
    np.testing.assert_array_equal(second, half)
    assert (first != half).any()
    with pytest.raises(ValueError, match="pack_x: the tokens of a microbatch must be"):
        pack_x(X[:7], recipe=recipe, key=KEY, microbatch=1)


@pytest.mark.parametrize(
    ("shape", "spec", "microbatch", "recipe", "message"),
    [
        ((24, K), "mk,kn->mn", 1, "rows", "multiple of 32.* got 24"),
        ((24, K), "mk,kn->mn", 1, "rotated", "multiple of 16.* got 24"),
        ((2, 32, K), "bmk,bkn->bmn", 1, "rows", "batch dimensions, got 1"),
        ((32, K), "mk,kn->mn", 1.0, "rows", "must be one integer, got microbatch=1.0"),
        ((32, K), "mk,kn->mn", [0, 1], "rows", r"must be one integer, got .*\(2,\)"),
    ],
)
def test_what_would_not_be_the_whole_raises(shape, spec, microbatch, recipe, message):
    w = W if len(shape) == 2 else jnp.stack([W, W])
    microbatch = np.asarray(microbatch) if isinstance(microbatch, list) else microbatch
    with pytest.raises(ValueError, match=message):
        fp4jax.einsum(
            spec,
            jnp.ones(shape),
            w,
            recipe=RECIPES[recipe],
            key=KEY,
            microbatch=microbatch,
        )


def test_a_recipe_without_blocks_along_tokens_takes_any_number_of_them():
    y = fp4jax.einsum("mk,kn->mn", X[:7], W, recipe=recipes.bf16(), microbatch=3)
    assert y.shape == (7, N)
    assert isinstance(recipes.mxfp4().dgrad.dy.rounding, Stochastic)
