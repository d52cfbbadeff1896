"""The three GEMMs against lax, against explicit products, under transforms."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import (
    E2M1,
    E4M3,
    NEAREST,
    UNIFORM,
    Quantizer,
    Scale,
    Site,
    Stochastic,
)

KEY = jax.random.key(0)
MATMUL = (((1,), (0,)), ((), ()))
RECIPES = {
    "bf16": recipes.bf16(),
    "e2m1_ref": recipes.e2m1_ref(),
    "ufp4": recipes.ufp4(),
    "nvfp4": recipes.nvfp4(),
    "int2": recipes.int2(),
}
QUANTIZED = [name for name in RECIPES if name != "bf16"]


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def operands(m=24, k=40, n=72, dtype=jnp.float32):
    return normal(1, (m, k), dtype), normal(2, (k, n)), normal(3, (m, n), dtype)


@functools.partial(jax.jit, static_argnames=("recipe", "dims", "weight", "precision"))
def value_and_grads(
    lhs, rhs, g, key, *, recipe, dims=MATMUL, weight="rhs", precision=None
):
    dot = functools.partial(
        fp4jax.dot_general,
        dimension_numbers=dims,
        recipe=recipe,
        key=key,
        weight=weight,
        precision=precision,
        preferred_element_type=g.dtype,
    )
    y, vjp = jax.vjp(dot, lhs, rhs)
    return y, *vjp(g)


def nearest(recipe):
    """The recipe with every stochastic site rounded to nearest."""

    def gemm(value):
        sites = {
            f.name: getattr(value, f.name)
            and dataclasses.replace(getattr(value, f.name), rounding=NEAREST)
            for f in dataclasses.fields(value)
        }
        return type(value)(**sites)

    return recipes.Recipe(gemm(recipe.fprop), gemm(recipe.dgrad), gemm(recipe.wgrad))


def relative(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@st.composite
def dot_problems(draw):
    """Shapes and dimension numbers that `lax.dot_general` accepts."""
    sizes = st.integers(1, 3)
    batch = draw(st.lists(sizes, max_size=2))
    contracting = draw(st.lists(sizes, max_size=2))
    free = [draw(st.lists(sizes, max_size=2)) for _ in range(2)]
    shapes, contracting_dims, batch_dims = [], [], []
    for side in free:
        roles = [("b", i) for i in range(len(batch))]
        roles += [("c", i) for i in range(len(contracting))]
        roles += [("f", i) for i in range(len(side))]
        roles = draw(st.permutations(roles))
        sources = {"b": batch, "c": contracting, "f": side}
        shapes.append(tuple(sources[kind][i] for kind, i in roles))
        contracting_dims.append(
            tuple(roles.index(("c", i)) for i in range(len(contracting)))
        )
        batch_dims.append(tuple(roles.index(("b", i)) for i in range(len(batch))))
    return shapes, (tuple(contracting_dims), tuple(batch_dims))


def lax_dot(dims):
    return functools.partial(
        lax.dot_general, dimension_numbers=dims, precision="highest"
    )


@functools.partial(jax.jit, static_argnames=("dims", "weight"))
def three_ways(lhs, rhs, g, *, dims, weight):
    """By lax, without a recipe, and with one that quantizes nothing: one program."""
    y, vjp = jax.vjp(lax_dot(dims), lhs, rhs)
    call = functools.partial(value_and_grads, lhs, rhs, g, KEY, dims=dims)
    return (
        (y, *vjp(g)),
        call(recipe=None, precision="highest", weight=weight),
        call(recipe=recipes.Recipe(compute="f32"), weight=weight),
    )


@settings(max_examples=6, deadline=None, derandomize=True)
@given(dot_problems(), st.sampled_from(["lhs", "rhs"]))
def test_without_quantizers_equals_lax_for_any_dimensions(problem, weight):
    shapes, dims = problem
    lhs, rhs = (normal(i, shape) for i, shape in enumerate(shapes))
    g = normal(2, jax.eval_shape(lax_dot(dims), lhs, rhs).shape)
    theirs, same, ours = three_ways(lhs, rhs, g, dims=dims, weight=weight)
    for a, b in zip(same, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    # At most 81 terms of order 1 are summed in another order.
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5)


def test_signature_extends_that_of_lax():
    theirs = inspect.signature(lax.dot_general).parameters
    ours = inspect.signature(fp4jax.dot_general).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


AXES = {
    Site.FPROP_X: 1,
    Site.FPROP_W: 0,
    Site.DGRAD_DY: 1,
    Site.DGRAD_W: 1,
    Site.WGRAD_X: 0,
    Site.WGRAD_DY: 0,
}


@functools.partial(jax.jit, static_argnums=0)
def quantized(recipe, x, w, g):
    """Operand and tensor scale of every site."""
    values = dict(zip(Site, (x, w, g, w, x, g), strict=True))
    qs = {
        site: fp4jax.quantize(
            values[site], recipe.sites[site], axis=axis, key=KEY, site=site
        )
        for site, axis in AXES.items()
    }
    return {site: (fp4jax.operand(q), q.tensor_scale) for site, q in qs.items()}


def explicit(recipe, x, w, g):
    """The three products of quantized operands, in float64."""
    sites = quantized(recipe, x, w, g)
    products = []
    for pair in zip(list(Site)[::2], list(Site)[1::2], strict=True):
        product = np.tensordot(
            *(np.asarray(sites[site][0], np.float64) for site in pair),
            axes=[AXES[site] for site in pair],
        )
        for site in pair:
            tensor_scale = sites[site][1]
            product = product * (1 if tensor_scale is None else float(tensor_scale))
        products.append(product)
    return products


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, "bfloat16") for name in QUANTIZED),
        ("ufp4", "float32"),
        ("nvfp4", "float32"),
        ("nvfp4", "float16"),
    ],
)
def test_equals_the_explicit_products_of_operands(name, dtype):
    x, w, g = operands(dtype=dtype)
    ours = value_and_grads(x, w, g, KEY, recipe=RECIPES[name])
    wanted = explicit(RECIPES[name], x, w, g)
    # Float32 sums of at most 80 terms; then the rounding to the dtype of the result.
    tolerances = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
    for a, b in zip(ours, wanted, strict=True):
        assert relative(a, b) < tolerances[str(a.dtype)]


@pytest.mark.parametrize("name", QUANTIZED)
def test_weight_on_the_left_takes_the_same_quantizers(name):
    recipe = nearest(RECIPES[name])
    x, w, g = operands()
    y, dx, dw = value_and_grads(x, w, g, KEY, recipe=recipe)
    y_t, dw_t, dx_t = value_and_grads(w.T, x.T, g.T, KEY, recipe=recipe, weight="lhs")
    for a, b in ((y, y_t.T), (dx, dx_t.T), (dw, dw_t.T)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", QUANTIZED)
def test_leading_dimensions_count_as_rows(name):
    x, w, g = operands()
    flat = value_and_grads(x, w, g, KEY, recipe=RECIPES[name])
    split = value_and_grads(
        x.reshape(2, 3, 4, 40),
        w,
        g.reshape(2, 3, 4, 72),
        KEY,
        recipe=RECIPES[name],
        dims=(((3,), (0,)), ((), ())),
    )
    for a, b in zip(flat, split, strict=True):
        np.testing.assert_array_equal(a, b.reshape(a.shape))


@pytest.mark.parametrize("name", ["e2m1_ref", "ufp4", "nvfp4"])
def test_several_contracting_dimensions_count_as_one(name):
    x, w, g = operands()
    flat = value_and_grads(x, w, g, KEY, recipe=RECIPES[name])
    split = value_and_grads(
        x.reshape(24, 5, 8),
        w.reshape(5, 8, 8, 9),
        g.reshape(24, 8, 9),
        KEY,
        recipe=RECIPES[name],
        dims=(((1, 2), (0, 1)), ((), ())),
    )
    for a, b in zip(flat, split, strict=True):
        np.testing.assert_array_equal(a, b.reshape(a.shape))


def test_batch_dimensions_are_never_blocked_together():
    # Per batch entry equal to a call of its own, where nothing is shared by a tensor.
    recipe = nearest(recipes.e2m1_ref())
    x, w, g = normal(1, (3, 24, 40)), normal(2, (3, 40, 72)), normal(3, (3, 24, 72))
    dims = (((2,), (1,)), ((0,), (0,)))
    batched = value_and_grads(x, w, g, KEY, recipe=recipe, dims=dims)
    for i in range(3):
        single = value_and_grads(x[i], w[i], g[i], KEY, recipe=recipe)
        for a, b in zip(batched, single, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-5)


SQUARE = recipes.Recipe(
    *(
        gemm(w=Quantizer(E2M1, block=(16, 16), scale=Scale(E4M3)))
        for gemm in (recipes.Fprop, recipes.Dgrad)
    )
)


def test_square_blocks_with_a_batch_dimension():
    x, w, g = normal(1, (2, 24, 40)), normal(2, (2, 40, 72)), normal(3, (2, 24, 72))
    dims = (((2,), (1,)), ((0,), (0,)))
    batched = value_and_grads(x, w, g, KEY, recipe=SQUARE, dims=dims)
    for i in range(2):
        single = value_and_grads(x[i], w[i], g[i], KEY, recipe=SQUARE)
        for a, b in zip(batched, single, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-5)


def test_square_blocks_of_a_weight_without_a_free_dimension():
    x, w, g = operands(n=1)
    matrix = value_and_grads(x, w, g, KEY, recipe=SQUARE)
    vector = value_and_grads(x, w[:, 0], g[:, 0], KEY, recipe=SQUARE)
    for a, b in zip(vector, matrix, strict=True):
        np.testing.assert_allclose(a, b.reshape(a.shape), rtol=1e-6, atol=1e-5)


def test_operands_of_one_gemm_may_have_other_blocks_or_none():
    x, w, g = operands()
    wide, narrow = Quantizer(UNIFORM, block=32), Quantizer(UNIFORM, block=16)
    recipe = recipes.Recipe(
        recipes.Fprop(x=wide, w=narrow), recipes.Dgrad(w=wide), recipes.Wgrad(dy=narrow)
    )
    y, dx, dw = value_and_grads(
        x, w, g, KEY, recipe=dataclasses.replace(recipe, compute="f32")
    )
    values = jax.jit(fp4jax.fake_quant, static_argnums=1, static_argnames="axis")
    with jax.default_matmul_precision("highest"):
        wanted = (
            values(x, wide, axis=1) @ values(w, narrow, axis=0),
            g @ values(w, wide, axis=1).T,
            x.T @ values(g, narrow, axis=0),
        )
    for a, b in zip((y, dx, dw), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5)


SR = Quantizer(UNIFORM, rounding=Stochastic())
SR_DY = recipes.Recipe(
    dgrad=recipes.Dgrad(dy=SR), wgrad=recipes.Wgrad(dy=SR), compute="f32"
)


@functools.partial(jax.jit, static_argnames="site")
def rounded(dy, *, site):
    """A matrix [free, contraction], stochastically rounded as at a site."""
    q = fp4jax.quantize(dy, SR, axis=1, key=KEY, site=site)
    return fp4jax.operand(q, jnp.float32)[:, : dy.shape[1]]


def test_rows_are_numbered_over_batch_and_free_dimensions():
    x, w, g = normal(1, (2, 24, 40)), normal(2, (2, 40, 72)), normal(3, (2, 24, 72))
    dims = (((2,), (1,)), ((0,), (0,)))
    _, dx, dw = value_and_grads(x, w, g, KEY, recipe=SR_DY, dims=dims)
    by_m = rounded(g.reshape(48, 72), site=Site.DGRAD_DY).reshape(2, 24, 72)
    by_n = jnp.swapaxes(g, 1, 2).reshape(144, 24)
    by_n = rounded(by_n, site=Site.WGRAD_DY).reshape(2, 72, 24)
    wanted_dx = np.einsum("bmn,bkn->bmk", by_m, w)
    wanted_dw = np.einsum("bmk,bnm->bkn", x, by_n)
    np.testing.assert_allclose(dx, wanted_dx, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(dw, wanted_dw, rtol=1e-5, atol=5e-5)


def test_weight_on_the_left_draws_at_free_and_contraction():
    w, x, g = operands()  # [n, k], [k, m], [n, m]
    _, dw, dx = value_and_grads(w, x, g, KEY, recipe=SR_DY, weight="lhs")
    with jax.default_matmul_precision("highest"):
        wanted_dx = (rounded(g.T, site=Site.DGRAD_DY) @ w).T  # [k, m]
        wanted_dw = rounded(g, site=Site.WGRAD_DY) @ x.T  # [n, k]
    np.testing.assert_allclose(dx, wanted_dx, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(dw, wanted_dw, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
    "compute, precision, wanted",
    [
        ("f32", None, "HIGHEST"),
        ("bf16", "high", "HIGH"),
        ("f32", "default", "DEFAULT"),
    ],
)
def test_precision_is_that_of_all_three_gemms(compute, precision, wanted):
    recipe = dataclasses.replace(recipes.e2m1_ref(), compute=compute)
    recipe = dataclasses.replace(recipe, wgrad=SR_DY.wgrad)  # without a transform
    call = functools.partial(value_and_grads, recipe=recipe, precision=precision)
    found = re.findall(r" precision=(.*)", str(jax.make_jaxpr(call)(*operands(), KEY)))
    assert len(found) >= 3
    assert {re.sub("Precision[.]", "", one) for one in found} <= {
        wanted,
        f"({wanted}, {wanted})",
    }


@pytest.mark.parametrize("name", QUANTIZED)
def test_sizes_that_do_not_divide_equal_explicit_padding(name):
    x, w, g = operands()
    plain = value_and_grads(x, w, g, KEY, recipe=RECIPES[name])
    # Row numbers, and so the noise of dy, change when the free axes are padded: here
    # only the axis that each GEMM contracts is.
    pad = lambda a, rows, columns: jnp.pad(a, ((0, rows), (0, columns)))
    call = functools.partial(value_and_grads, key=KEY, recipe=RECIPES[name])
    y, _, _ = call(pad(x, 0, 8), pad(w, 8, 0), g)
    _, dx, _ = call(x, pad(w, 0, 8), pad(g, 0, 8))
    _, _, dw = call(pad(x, 8, 0), w, pad(g, 8, 0))
    for a, b in zip(plain, (y, dx, dw), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


def test_jit_equals_eager():
    # Of one shape, and one GEMM of each kind: eager calls compile less.
    x, w, g = operands(16, 16, 16)
    recipe = recipes.Recipe(recipes.ufp4().fprop, recipes.nvfp4().dgrad)
    compiled = value_and_grads(x, w, g, KEY, recipe=recipe)
    eager = value_and_grads.__wrapped__(x, w, g, KEY, recipe=recipe)
    for a, b in zip(compiled, eager, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", list(RECIPES))
def test_gradients_have_the_dtype_of_their_operand(name):
    x, w, g = operands(dtype=jnp.bfloat16)
    y, dx, dw = value_and_grads(x, w, g, KEY, recipe=RECIPES[name])
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16])
def test_result_has_the_dtype_that_lax_gives(preferred):
    x, w, _ = operands(dtype=jnp.bfloat16)
    for rhs in (w, w.astype(jnp.bfloat16)):
        args = (x, rhs, MATMUL, None, preferred)
        wanted = jax.eval_shape(lambda a=args: lax.dot_general(*a))
        ours = lambda a=args: fp4jax.dot_general(*a, recipe=recipes.ufp4())
        assert jax.eval_shape(ours).dtype == wanted.dtype


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_layer_differs_from_bf16_almost_everywhere(name):
    x, w, g = operands(256, 128, 256, jnp.bfloat16)
    baseline = value_and_grads(x, w, g, KEY, recipe=RECIPES["bf16"])
    ours = value_and_grads(x, w, g, KEY, recipe=RECIPES[name])
    for a, b in zip(ours, baseline, strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) > 0.95
        if name != "int2":
            assert 0.05 < relative(a, b) < 0.3


def test_keys_decide_the_noise():
    x, w, g = operands()
    first = value_and_grads(x, w, g, KEY, recipe=recipes.ufp4())
    again = value_and_grads(x, w, g, KEY, recipe=recipes.ufp4())
    other = value_and_grads(x, w, g, jax.random.key(1), recipe=recipes.ufp4())
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first[0], other[0])  # forward rounds to nearest
    for a, b in zip(first[1:], other[1:], strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) > 0.5


def test_one_compilation_for_many_keys():
    x, w, g = operands()
    traces = 0

    @jax.jit
    def step(key):
        nonlocal traces
        traces += 1
        return value_and_grads.__wrapped__(x, w, g, key, recipe=recipes.nvfp4())

    for seed in range(3):
        step(jax.random.key(seed))
    assert traces == 1


def test_stochastic_gradients_are_unbiased():
    stochastic = Quantizer(UNIFORM, rounding=Stochastic())
    recipe = recipes.Recipe(
        dgrad=recipes.Dgrad(dy=stochastic),
        wgrad=recipes.Wgrad(dy=stochastic),
        compute="f32",
    )
    x, w, g = operands(16, 16, 16)
    keys = jax.random.split(KEY, 2000)
    draws = jax.vmap(lambda key: value_and_grads(x, w, g, key, recipe=recipe)[1:])(keys)
    for drawn, exact in zip(draws, (g @ w.T, x.T @ g), strict=True):
        drawn = np.asarray(drawn)
        z = (drawn.mean(0) - exact) / (drawn.std(0) / len(keys) ** 0.5)
        assert np.abs(z).max() < 5


TRANSFORMS = {
    "vmap": lambda f: lambda *args: jax.vmap(f)(*(a[None] for a in args)),
    "remat": jax.checkpoint,
    "remat of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "scan": lambda f: (
        lambda *args: lax.scan(lambda c, a: (c, f(*a)), 0, [a[None] for a in args])[1]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["ufp4", "nvfp4"])
def test_transforms_leave_the_gradients_as_they_are(transform, name):
    x, w, g = operands()

    def loss(x, w):
        dot = functools.partial(fp4jax.dot_general, dimension_numbers=MATMUL, key=KEY)
        return jnp.sum(dot(x, w, recipe=RECIPES[name]) * g)

    plain = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    transformed = TRANSFORMS[transform](loss)
    ours = jax.jit(jax.grad(lambda *a: jnp.sum(transformed(*a)), (0, 1)))(x, w)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_vmapped_lanes_equal_calls_of_their_own():
    x, w, g = normal(1, (3, 24, 40)), normal(2, (40, 72)), normal(3, (3, 24, 72))
    call = functools.partial(value_and_grads, recipe=recipes.nvfp4())
    keys = jax.random.split(KEY, 3)
    lanes = jax.vmap(call, in_axes=(0, None, 0, 0))(x, w, g, keys)
    for i in range(3):
        for a, b in zip(lanes, call(x[i], w, g[i], keys[i]), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-5)


def test_second_derivatives_raise():
    x, w, _ = operands()
    dot = functools.partial(fp4jax.dot_general, dimension_numbers=MATMUL, key=KEY)
    f = lambda x: jnp.sum(dot(x, w, recipe=recipes.ufp4()) ** 2)
    second = {
        "grad of grad": jax.grad(lambda x: jnp.sum(jax.grad(f)(x))),
        "jit": jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))),
        "hessian": jax.hessian(f),
        "scan": lambda x: jax.grad(
            lambda x: jnp.sum(lax.map(jax.grad(f), x[None])), allow_int=False
        )(x),
    }
    for name, function in second.items():
        with pytest.raises(NotImplementedError, match="^dot_general: .* first order"):
            function(x)
            pytest.fail(name)


def test_gradients_keep_the_sharding_of_their_operand():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w, g = operands(64, 64, 64)
    unsharded = value_and_grads(x, w, g, KEY, recipe=recipes.ufp4())
    place = lambda a, *spec: jax.device_put(
        a, NamedSharding(mesh, PartitionSpec(*spec))
    )
    with jax.set_mesh(mesh):
        x, w = place(x, "data", None), place(w, None, "model")
        g = place(g, "data", "model")
        ours = value_and_grads(x, w, g, KEY, recipe=recipes.ufp4())
    for a, like in zip(ours, (g, x, w), strict=True):
        assert jax.typeof(a).sharding.spec == jax.typeof(like).sharding.spec
    # The same operands; sums over a sharded contraction come in another order.
    for a, b in zip(ours, unsharded, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_out_sharding_is_honoured():
    # Four shards of the contraction axis, one block of 16 each.
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=devices)
    x, w, _ = operands(64, 64, 64)
    wanted = NamedSharding(mesh, PartitionSpec("data", None))
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, jax.P(*spec))
        dot = functools.partial(
            fp4jax.dot_general, dimension_numbers=MATMUL, recipe=recipes.ufp4()
        )
        sharded = jax.jit(functools.partial(dot, out_sharding=wanted))
        y = sharded(place(x, None, "data"), place(w, "data", None))
    assert jax.typeof(y).sharding.spec == wanted.spec
    # The same operands; sums over a sharded contraction come in another order.
    np.testing.assert_allclose(y, jax.jit(dot)(x, w), rtol=1e-5, atol=1e-5)


def test_nan_reaches_the_result():
    x, w, g = operands()
    x = x.at[3, 5].set(jnp.nan)
    y, dx, dw = value_and_grads(x, w, g, KEY, recipe=recipes.e2m1_ref())
    assert np.isnan(y[3]).all() and not np.isnan(np.delete(y, 3, 0)).any()
    assert not np.isnan(dx).any()
    assert np.isnan(dw[5]).all() and not np.isnan(np.delete(dw, 5, 0)).any()


def test_no_tokens_give_zero_gradients():
    x, w, g = jnp.zeros((0, 40)), normal(2, (40, 72)), jnp.zeros((0, 72))
    for name in RECIPES:
        y, dx, dw = value_and_grads(x, w, g, KEY, recipe=RECIPES[name])
        assert y.shape == (0, 72) and dx.shape == (0, 40)
        np.testing.assert_array_equal(dw, np.zeros((40, 72)))


def test_a_key_is_needed_to_differentiate_a_recipe_that_draws():
    x, w, _ = operands()
    f = lambda x: jnp.sum(fp4jax.dot_general(x, w, MATMUL, recipe=recipes.ufp4()))
    assert np.isfinite(f(x))
    with pytest.raises(ValueError, match="^dot_general: key must be a PRNG key to"):
        jax.grad(f)(x)


def test_a_key_is_needed_where_the_forward_pass_draws():
    x, w, _ = operands()
    recipe = recipes.Recipe(recipes.Fprop(x=Quantizer(UNIFORM, rounding=Stochastic())))
    with pytest.raises(ValueError, match="key must be a PRNG key for the forward"):
        fp4jax.dot_general(x, w, MATMUL, recipe=recipe)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"weight": "left"}, ValueError, "weight must be 'lhs' or 'rhs'.*'left'"),
        (
            {"weight": "left", "recipe": None},
            ValueError,
            "weight must be 'lhs' or 'rhs'.*'left'",
        ),
        ({"recipe": "ufp4"}, TypeError, "recipe must be a Recipe, got 'ufp4'"),
        ({"lhs": jnp.ones((24, 40), jnp.int32)}, TypeError, "lhs must be.*dtype=int32"),
        ({"rhs": jnp.ones((40, 72), jnp.complex64)}, TypeError, "rhs must be.*complex"),
        ({"rhs": jnp.ones((41, 72))}, TypeError, "contracting dimensions"),
        (
            {"preferred_element_type": jnp.float8_e5m2},
            TypeError,
            "result must be float32, bfloat16 or float16, got dtype=float8_e5m2",
        ),
    ],
    ids=["weight", "weight-alone", "recipe", "integers", "complex", "shapes", "result"],
)
def test_bad_arguments_raise(arguments, error, message):
    x, w, _ = operands()
    defaults = {"lhs": x, "rhs": w, "recipe": recipes.ufp4(), "key": KEY}
    with pytest.raises(error, match=message):
        fp4jax.dot_general(dimension_numbers=MATMUL, **defaults | arguments)


@pytest.mark.parametrize("name", ["held", "step", "microbatch", "packed", "packed_w"])
def test_what_no_recipe_would_read_raises(name):
    x, w, _ = operands()
    message = f"must be None with recipe=None, which quantizes nothing, got {name}"
    with pytest.raises(ValueError, match=message):
        fp4jax.dot_general(x, w, MATMUL, **{name: jnp.zeros(())})
