"""A grouped product is a quantized product for each group, whatever the sizes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import policies, recipes
from fp4jax.numerics import NEAREST, Hadamard, Quantizer
from fp4jax.ops.tiles import Tiles, filled, tile_rows
from fp4jax.policies import PRESETS
from fp4jax.recipes import Dgrad, Fprop, Wgrad
from tests.kernels.cases import several_devices

KEY = jax.random.key(0)
DIMS = (((1,), (0,)), ((), ()))
E, K, N = 4, 40, 24
RECIPES = {name: getattr(recipes, name)() for name in PRESETS}
UNEVEN = (3, 0, 17, 12)
IN_FP8 = dataclasses.replace(recipes.mxfp4(), compute="fp8")
ONE_BLOCK = Quantizer(recipes.mxfp8().fprop.x.grid, block=24)


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def operands(m, dtype=jnp.float32):
    return normal(1, (m, K), dtype), normal(2, (E, K, N)), normal(3, (m, N), dtype)


def quiet(recipe):
    """The recipe with nothing drawn."""

    def nearest(q):
        if q is None:
            return None
        rotation = q.rotation and Hadamard(q.rotation.size)
        return dataclasses.replace(q, rounding=NEAREST, rotation=rotation)

    kinds = {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}
    return dataclasses.replace(
        recipe,
        **{
            name: kind(*(nearest(q) for q in vars(getattr(recipe, name)).values()))
            for name, kind in kinds.items()
        },
    )


def loop(x, w, sizes, held=None, *, as_parts=False, **options):
    """Every group by itself; with `as_parts` it draws what it draws in the whole."""
    rows, start = [], 0
    for i, size in enumerate(sizes):
        if as_parts and size:
            options["microbatch"] = start // size
        y = fp4jax.dot_general(
            x[start : start + size],
            w[i],
            DIMS,
            key=KEY,
            held=None if held is None else held[i],
            **options,
        )
        rows.append(y)
        start += size
    rows.append(jnp.zeros((len(x) - start, w.shape[2]), rows[0].dtype))
    return jnp.concatenate(rows)


def ragged(x, w, sizes, held=None, **options):
    options = {"key": KEY, **options}
    return fp4jax.ragged_dot(x, w, jnp.asarray(sizes), held=held, **options)


@functools.partial(jax.jit, static_argnames=("product", "sizes", "options"))
def value_and_grads(product, x, w, dy, sizes, held=None, options=()):
    run = functools.partial(product, sizes=sizes, **dict(options))
    y, vjp = jax.vjp(lambda x, w, held: run(x, w, held=held), x, w, held)
    return y, *vjp(dy.astype(y.dtype))


def check_equal_to_loop(sizes, m, *, held=None, dtype=jnp.float32, parts=(), **options):
    x, w, dy = operands(m, dtype)
    options = tuple(sorted(options.items()))
    found = value_and_grads(ragged, x, w, dy, sizes, held, options)
    expected = value_and_grads(loop, x, w, dy, sizes, held, (*options, *parts))
    assert found[2].dtype == w.dtype and found[1].dtype == dtype
    # The terms of a sum are equal; a float32 sum of t of them, each at most the product
    # of the amaxes, which are below 5, differs by t units of 2^-24 of its magnitudes.
    # One code more or less would change a term by an eighth of its block's amax.
    terms = max(m, K)
    close = functools.partial(np.testing.assert_allclose, atol=terms**2 * 2**-24 * 25)
    for a, b in zip(found[:3], expected[:3], strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        close(a, b, rtol=0 if dtype == jnp.float32 else 2**-7)
    for i, size in enumerate(sizes):
        assert size or (found[2][i] == 0).all()
    assert (found[0][sum(sizes) :] == 0).all() and (found[1][sum(sizes) :] == 0).all()
    return found, expected


@pytest.mark.parametrize("name", RECIPES)
def test_groups_are_products_of_their_own(name):
    """Sizes that are no blocks, an empty group, rows beyond, odd k and n."""
    check_equal_to_loop(UNEVEN, 37, recipe=quiet(RECIPES[name]))


@pytest.mark.parametrize("name", sorted({*RECIPES} - {"mxfp4_tseng", "quartet2"}))
def test_rows_draw_what_they_draw_in_the_whole(name):
    """Not those recipes that draw for w, of which a group is a part as well."""
    sizes = (32, 0, 32, 64)
    parts = (("as_parts", True),)
    check_equal_to_loop(sizes, 128, parts=parts, recipe=RECIPES[name])


@pytest.mark.parametrize("sizes", [(0, 32, 0, 0), (0, 0, 0, 32), (0, 0, 0, 0)])
def test_one_group_may_have_all_rows_or_none(sizes):
    check_equal_to_loop(sizes, 32, recipe=quiet(recipes.ti2d()))


def test_there_may_be_no_rows():
    options = (("recipe", recipes.nvfp4()),)
    run = functools.partial(value_and_grads, ragged, sizes=(0,) * E, options=options)
    x, w, dy = operands(0)
    y, dx, dw, _ = jax.eval_shape(run, x, w, dy)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, w.shape)


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "ti2d"])
def test_operands_in_bfloat16(name):
    check_equal_to_loop(UNEVEN, 37, recipe=quiet(RECIPES[name]), dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", ["ufp4", "nvfp4", "quartet2"])
def test_packed_residuals_give_the_same_gradients(name):
    x, w, dy = operands(37)
    recipe = RECIPES[name]
    packed = dataclasses.replace(recipe, residuals="packed")
    a, b = (
        value_and_grads(ragged, x, w, dy, UNEVEN, None, (("recipe", r),))
        for r in (recipe, packed)
    )
    for x, y in zip(a[:3], b[:3], strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_amax_is_that_of_a_group():
    x, w, dy = operands(32)
    recipe = recipes.ue5m3(every=5)
    of_held = lambda held: jnp.sum(ragged(x, w, UNEVEN, held, recipe=recipe) * dy)
    state = jax.jit(jax.grad(of_held))(jnp.zeros((E, 3)))
    group = np.repeat(np.arange(E), UNEVEN)
    of_rows = lambda x: [jnp.max(jnp.abs(x[group == i]), initial=0) for i in range(E)]
    np.testing.assert_array_equal(state[:, 0], jnp.stack(of_rows(x)))
    np.testing.assert_array_equal(state[:, 1], jnp.max(jnp.abs(w), (1, 2)))
    np.testing.assert_array_equal(state[:, 2], jnp.stack(of_rows(dy)))


@pytest.mark.parametrize("step", [3, 5])
def test_every_group_holds_its_amaxes(step):
    held = jnp.zeros((E, 3)).at[2].set(jnp.float32([9.0, 8.0, 7.0]))
    recipe = quiet(recipes.ue5m3(every=5))
    check = functools.partial(check_equal_to_loop, UNEVEN, 37, recipe=recipe)
    found, expected = check(held=held, step=step)
    np.testing.assert_array_equal(found[3], expected[3])
    assert (found[3][2] == held[2]).all() == (step == 3)


def test_rows_draw_by_their_positions():
    """Sorted by group, under one w for all, rows are those of the batch unsorted."""
    recipe, m = recipes.e2m1_ref(), 32
    x, w, dy = operands(m)
    w = jnp.broadcast_to(w[:1], w.shape)
    order = jax.random.permutation(KEY, m)
    positions = order.astype(jnp.uint32)

    @jax.jit
    def run(x, dy):
        whole = lambda x: fp4jax.dot_general(x, w[0], DIMS, recipe=recipe, key=KEY)
        parts = lambda x: ragged(x, w, UNEVEN, recipe=recipe, positions=positions)
        dx = jax.vjp(whole, x)[1](dy)[0]
        return dx, jax.vjp(parts, x[order])[1](dy[order])[0]

    dx, of_parts = run(x, dy)
    np.testing.assert_allclose(of_parts, dx[order], atol=N**2 * 2**-24 * 25)


def loss(x, w, dy, **options):
    options = {"recipe": recipes.nvfp4(), **options}
    return jnp.sum(ragged(x, w, UNEVEN, **options) * dy)


def test_lanes_of_a_vmap_are_calls():
    xs, ws, dys = (jnp.stack([a, -2 * a[::-1]]) for a in operands(37))
    grads = jax.grad(loss, argnums=(0, 1))
    found = jax.jit(jax.vmap(grads))(xs, ws, dys)
    for lane in range(2):
        expected = jax.jit(grads)(xs[lane], ws[lane], dys[lane])
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a[lane], b, atol=37**2 * 2**-24 * 50)


def test_scan_and_remat_give_the_same_gradients():
    x, w, dy = operands(37)
    ws = jnp.stack([w, w + 1])

    def by_scan(ws, step):
        return lax.scan(lambda y, w: (y + step(x, w, dy), None), 0.0, ws)[0]

    plain = lambda ws: loss(x, ws[0], dy) + loss(x, ws[1], dy)
    expected = jax.jit(jax.grad(plain))(ws)
    for step in (loss, jax.checkpoint(loss)):
        found = jax.jit(jax.grad(functools.partial(by_scan, step=step)))(ws)
        np.testing.assert_array_equal(found, expected)


def test_no_recipe_is_the_product_of_lax():
    x, w, _ = operands(37)
    sizes = jnp.asarray(UNEVEN)
    y = fp4jax.ragged_dot(x, w, sizes)
    np.testing.assert_array_equal(y, lax.ragged_dot(x, w, sizes))
    assert (y[sum(UNEVEN) :] == 0).all()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": jnp.ones((37, 8))}, TypeError, "w must be .m, k. and .e, k, n"),
        ({"x": jnp.ones((37, 0)), "w": jnp.ones((4, 0, 8))}, ValueError, "one row and"),
        ({"group_sizes": jnp.ones(3, jnp.int32)}, ValueError, "must be 4 integers"),
        ({"group_sizes": jnp.ones(4)}, ValueError, "must be 4 integers"),
        ({"x": jnp.ones((37, K), jnp.int32)}, TypeError, "x must be"),
        ({"recipe": "ufp4"}, TypeError, "ragged_dot: recipe must be a Recipe"),
        ({"recipe": None, "step": 1}, ValueError, "recipe=None"),
        ({"recipe": recipes.ti2d(sr_all=True), "key": None}, ValueError, "for the"),
        ({"recipe": IN_FP8}, NotImplementedError, "'bf16' or 'f32', got 'fp8'"),
        ({"positions": jnp.arange(37)}, ValueError, "must be uint32.37."),
        ({"microbatch": 1.5}, ValueError, "microbatch must be one integer"),
        ({"step": 1}, ValueError, "ragged_dot: step must be None"),
        ({"held": jnp.zeros((4, 3))}, ValueError, "held must be None for a recipe"),
        (
            {"held": jnp.zeros(3), "recipe": recipes.ue5m3()},
            ValueError,
            r"held must be float32\[4, 3\]",
        ),
    ],
)
def test_what_cannot_be_honored_raises(changes, error, words):
    x, w, _ = operands(37)
    arguments = {"x": x, "w": w, "group_sizes": jnp.asarray(UNEVEN), "key": KEY}
    with pytest.raises(error, match=words):
        fp4jax.ragged_dot(**{**arguments, "recipe": recipes.ufp4(), **changes})


@several_devices
@pytest.mark.parametrize("name", ["x", "positions"])
def test_rows_on_several_devices_are_one_sentence(name):
    x, w, _ = operands(32)
    whole = {"x": x, "positions": jnp.arange(32, dtype=jnp.uint32)}
    dot = functools.partial(ragged, w=w, sizes=UNEVEN, recipe=recipes.ufp4())
    kind = {"axis_types": (AxisType.Explicit,)}
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("a",), **kind)):
        rows = jax.sharding.reshard(whole[name], P("a"))
        words = f"{name} must not be spread .* first .*reshard.{name}, jax.P"
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(dot, **whole | {name: rows})
        together = jax.sharding.reshard(rows, jax.P())
        jax.eval_shape(dot, **whole | {name: together})


def test_what_cannot_be_differentiated_raises():
    x, w, dy = operands(37)
    with pytest.raises(ValueError, match="ragged_dot: key must be a PRNG key to diff"):
        jax.eval_shape(jax.grad(functools.partial(loss, key=None)), x, w, dy)
    second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, w, dy)))
    with pytest.raises(NotImplementedError, match="^ragged_dot: .* second derivative"):
        jax.eval_shape(second, x)
    held = functools.partial(loss, recipe=recipes.ue5m3(), held=jnp.zeros((E, 3)))
    with pytest.raises(NotImplementedError, match="under jax.vmap"):
        jax.eval_shape(jax.vmap(held), x[None], w[None], dy[None])


def test_tiles_are_whole_blocks_of_every_operand():
    assert {name: tile_rows(recipe) for name, recipe in RECIPES.items()} == {
        **dict.fromkeys(RECIPES, 16),
        **dict.fromkeys(["mxfp4", "mxfp8", "ti2d"], 32),
        **{"mxfp4_tseng": 64, "quartet2": 128},
    }
    in_24 = dataclasses.replace(recipes.bf16(), wgrad=Wgrad(x=ONE_BLOCK))
    assert tile_rows(in_24) == 48


@pytest.mark.parametrize("sizes", [UNEVEN, (0, 0, 0, 0), (37, 0, 0, 0), (1, 1, 1, 1)])
def test_tiles_hold_every_row_once(sizes):
    tiles = Tiles.of_sizes(jnp.asarray(sizes, jnp.int32), 37, rows=16)
    rows = jnp.arange(1, 38, dtype=jnp.int32)
    laid = tiles.lay_out(rows)
    np.testing.assert_array_equal(
        tiles.rows_of(laid), jnp.where(rows <= sum(sizes), rows, 0)
    )
    group = np.repeat(np.arange(E), sizes)
    for tile, i in zip(np.asarray(laid), np.asarray(tiles.of), strict=True):
        assert (group[tile[tile > 0] - 1] == i).all()
        assert (tile > 0).any() == (i < E)
    first = jnp.uint32(40)
    positions = np.asarray(filled(tiles.positions(rows.astype(jnp.uint32)), first))
    np.testing.assert_array_equal(positions[laid > 0], laid[laid > 0] + 40)
    of_used = positions[(laid > 0).any(1)]
    assert len(np.unique(of_used)) == of_used.size


def test_rows_move_to_tiles_and_back_by_gathers_and_gradients_too():
    def loss(x, labels):
        tiles = Tiles.of_labels(labels, 4, rows=16)
        return jnp.sum(jnp.sin(tiles.rows_of(jnp.sin(tiles.lay_out(x)))))

    x, labels = jnp.arange(74.0).reshape(37, 2), jnp.arange(37, dtype=jnp.int32) % 5
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(x, labels))
    scattered = re.findall(r"(\w+)\[[\d,]*\] = scatter", jaxpr)
    assert "i32" in scattered and "f32" not in scattered
    expected = jnp.where(labels[:, None] < 4, jnp.cos(jnp.sin(x)) * jnp.cos(x), 0)
    found = jax.grad(loss)(x, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_tiles_of_parts_are_as_many_in_each():
    labels = jnp.array([3, 0, 3, 1, 3, 0, 3], jnp.int32)
    tiles = Tiles.of_labels(labels, 4, rows=2, parts=2)
    np.testing.assert_array_equal(tiles.of, [0, 1, 4, 4, 3, 3, 4, 4])
    laid = tiles.lay_out(jnp.arange(1, 8, dtype=jnp.int32))
    expected = [[2, 6], [4, 0], [0, 0], [0, 0], [1, 3], [5, 7], [0, 0], [0, 0]]
    np.testing.assert_array_equal(laid, expected)


def test_policies_and_recipes_are_of_the_same_names():
    assert set(RECIPES) == set(policies.PRESETS)
