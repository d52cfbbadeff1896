"""Einsum against `jnp.einsum`, and against explicit `dot_general`s with a recipe."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp4jax
from fp4jax import recipes
from fp4jax.ops.einsum import einsum_with

KEY = jax.random.key(0)


def integers(seed, shape):
    """Small integers: sums of their products are exact in any order."""
    values = np.random.default_rng(seed).integers(-4, 5, shape)
    return jnp.asarray(values, jnp.float32)


def normal(seed, shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def value_and_grads(einsum, spec, lhs, rhs, g=None, **kwargs):
    y, vjp = jax.vjp(lambda *args: einsum(spec, *args, **kwargs), lhs, rhs)
    g = integers(2, y.shape) if g is None else g
    return y, *vjp(g)


def assert_equals_theirs(spec, lhs_shape, rhs_shape):
    lhs, rhs = integers(0, lhs_shape), integers(1, rhs_shape)
    theirs = value_and_grads(jnp.einsum, spec, lhs, rhs)
    ours = value_and_grads(fp4jax.einsum, spec, lhs, rhs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


SPECS = [
    ("bsd,df->bsf", (2, 3, 4), (4, 5)),
    ("...d,df", (2, 3, 4), (4, 5)),
    ("b...k, kn -> n...b", (2, 3, 3, 4), (4, 5)),
    ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
    ("abc,cde->abde", (2, 3, 4), (4, 5, 2)),
    ("ab,cd->da", (2, 3), (4, 5)),
    ("ba,ca", (2, 3), (4, 3)),
    ("ii,ij->j", (3, 3), (3, 4)),
    ("iij,jk", (3, 3, 4), (4, 5)),
    ("iii,i->i", (3, 3, 3), (3,)),
    ("ij,ij->", (2, 3), (2, 3)),
    (",ij->ji", (), (2, 3)),
    ("...,...", (2, 3), (3,)),
    ("...i,...i->...", (1, 3, 4), (5, 1, 4)),
    ("a...,...b->ab...", (2, 3), (5, 3, 2)),
    ("...i,ij->j", (2, 3, 4), (4, 5)),
    ("i...,j->...", (2, 3), (4,)),
    ("a,a->", (1,), (3,)),
    ("ab,ab->ba", (1, 3), (2, 3)),
    ("ij,jk->ik", (0, 3), (3, 2)),
]


@pytest.mark.parametrize("spec, lhs, rhs", SPECS, ids=[spec for spec, *_ in SPECS])
def test_without_a_recipe_equals_theirs(spec, lhs, rhs):
    assert_equals_theirs(spec, lhs, rhs)


@st.composite
def problems(draw):
    """A spec and the two shapes that it fits."""
    sizes = {label: draw(st.integers(1, 3)) for label in "abcd"}
    extra = [draw(st.integers(1, 3)) for _ in range(2)]
    terms, shapes = [], []
    for _ in range(2):
        labels = draw(st.lists(st.sampled_from("abcd"), max_size=4))
        term = list(labels)
        shape = [sizes[label] for label in labels]
        if draw(st.booleans()):
            at = draw(st.integers(0, len(labels)))
            dims = extra[2 - draw(st.integers(0, 2)) :]
            dims = [draw(st.sampled_from([1, size])) for size in dims]
            term.insert(at, "...")
            shape[at:at] = dims
        terms.append(term)
        shapes.append(tuple(shape))
    spec = draw(st.sampled_from([",", " , "])).join(map("".join, terms))
    if draw(st.booleans()):
        known = sorted({label for term in terms for label in term})
        out = draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        spec += "->" + "".join(out)
    return spec, *shapes


@settings(max_examples=10, deadline=None, derandomize=True)
@given(problems())
def test_any_spec_equals_theirs(problem):
    assert_equals_theirs(*problem)


@pytest.mark.parametrize("shapes", [((1, 3), (2, 3)), ((2, 1), (2, 3))])
@pytest.mark.parametrize("spec", ["ab,ab->ab", "ab,ab->b", "ab,ab"])
def test_named_dimensions_of_size_one_are_broadcast(spec, shapes):
    assert_equals_theirs(spec, *shapes)


MATMUL = (((2,), (0,)), ((), ()))
RECIPES = {"ufp4": recipes.ufp4(), "nvfp4": recipes.nvfp4()}


@functools.partial(jax.jit, static_argnames=("spec", "recipe", "weight"))
def quantized(spec, lhs, rhs, g, key, *, recipe, weight="rhs"):
    return value_and_grads(
        fp4jax.einsum, spec, lhs, rhs, g, recipe=recipe, key=key, weight=weight
    )


@functools.partial(jax.jit, static_argnames=("dims", "recipe"))
def explicit(lhs, rhs, g, key, *, dims, recipe):
    dot = functools.partial(
        fp4jax.dot_general, dimension_numbers=dims, recipe=recipe, key=key
    )
    y, vjp = jax.vjp(dot, lhs, rhs)
    return y, *vjp(g)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_with_a_recipe_equals_the_explicit_dot_general(recipe, dtype):
    x, w = normal(0, (2, 12, 40), dtype), normal(1, (40, 24), dtype)
    g = normal(2, (2, 12, 24), dtype)
    wanted = explicit(x, w, g, KEY, dims=MATMUL, recipe=recipe)
    ours = quantized("bsd,df->fbs", x, w, g.transpose(2, 0, 1), KEY, recipe=recipe)
    for a, b in zip((ours[0].transpose(1, 2, 0), *ours[1:]), wanted, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_summed_and_diagonal_labels_are_gone_before_anything_is_quantized():
    x, w, g = normal(0, (2, 3, 12, 32)), normal(1, (24, 32, 32)), normal(2, (12, 24))
    ours = quantized("abck,fkk->cf", x, w, g, KEY, recipe=recipes.ufp4())
    x2, w2 = x.sum((0, 1)), jnp.diagonal(w, axis1=1, axis2=2)
    dims = (((1,), (1,)), ((), ()))
    y, dx, dw = explicit(x2, w2, g, KEY, dims=dims, recipe=recipes.ufp4())
    np.testing.assert_array_equal(ours[0], y)
    np.testing.assert_array_equal(ours[1], jnp.broadcast_to(dx, x.shape))
    np.testing.assert_array_equal(jnp.diagonal(ours[2], axis1=1, axis2=2), dw)
    np.testing.assert_array_equal(ours[2] * (1 - jnp.eye(32))[None], 0 * w)


def test_batch_labels_are_batch_dimensions():
    x, w, g = normal(0, (12, 3, 40)), normal(1, (3, 40, 24)), normal(2, (3, 12, 24))
    ours = quantized("sek,ekn->esn", x, w, g, KEY, recipe=recipes.ufp4())
    dims = (((2,), (1,)), ((1,), (0,)))
    wanted = explicit(x, w, g, KEY, dims=dims, recipe=recipes.ufp4())
    for a, b in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_several_contracted_labels_come_in_the_order_of_the_left_operand():
    x, w, g = normal(0, (12, 4, 8)), normal(1, (8, 4, 24)), normal(2, (12, 24))
    ours = quantized("snd,dnf->sf", x, w, g, KEY, recipe=recipes.ufp4())
    dims = (((1, 2), (1, 0)), ((), ()))
    wanted = explicit(x, w, g, KEY, dims=dims, recipe=recipes.ufp4())
    for a, b in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_weight_may_come_first():
    # Square blocks quantize only w, so the recipe tells the two operands apart.
    quantizer = recipes.nvfp4().fprop.w
    recipe = recipes.Recipe(recipes.Fprop(w=quantizer), recipes.Dgrad(w=quantizer))
    x, w, g = normal(0, (12, 40)), normal(1, (40, 24)), normal(2, (12, 24))
    y, dx, dw = quantized("sk,kn->sn", x, w, g, KEY, recipe=recipe)
    first = quantized("kn,sk->sn", w, x, g, KEY, recipe=recipe, weight="lhs")
    for a, b in zip(first, (y, dw, dx), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    other = quantized("kn,sk->sn", w, x, g, KEY, recipe=recipe)
    assert np.mean(np.asarray(other[0]) != np.asarray(first[0])) > 0.9


def test_nnx_params_are_taken():
    x, w = normal(0, (12, 32)), normal(1, (32, 24))
    call = functools.partial(fp4jax.einsum, "sk,kn->sn", recipe=recipes.e2m1_ref())
    np.testing.assert_array_equal(call(x, nnx.Param(w)), call(x, w))


def test_vmapped_lanes_equal_calls_of_their_own():
    x, w, g = normal(0, (3, 12, 32)), normal(1, (32, 24)), normal(2, (3, 12, 24))
    call = functools.partial(quantized, "sk,kn->sn", recipe=recipes.ufp4())
    keys = jax.random.split(KEY, 3)
    lanes = jax.vmap(call, in_axes=(0, None, 0, 0))(x, w, g, keys)
    for i in range(3):
        for a, b in zip(lanes, call(x[i], w, g[i], keys[i]), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("preferred", [None, jnp.float32])
@pytest.mark.parametrize("recipe", [None, recipes.e2m1_ref()], ids=["none", "e2m1"])
def test_the_result_has_the_dtype_of_theirs(recipe, preferred):
    x, w = normal(0, (2, 32), jnp.bfloat16), normal(1, (32, 3), jnp.bfloat16)
    kwargs = {"preferred_element_type": preferred}
    wanted = jnp.einsum("ab,bc", x, w, **kwargs)
    assert fp4jax.einsum("ab,bc", x, w, recipe=recipe, **kwargs).dtype == wanted.dtype


def test_precision_reaches_the_product():
    call = lambda x: fp4jax.einsum("ab,bc", x, x, precision="highest")
    assert "HIGHEST" in str(jax.make_jaxpr(call)(jnp.ones((2, 2))))


@pytest.mark.parametrize("named", [False, True], ids=["spec", "named"])
def test_out_sharding_is_that_of_the_result(named):
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit,) * 2, devices=devices)
    wanted = PartitionSpec("b", None, "a")
    sharding = NamedSharding(mesh, wanted) if named else wanted
    x, w = normal(0, (4, 3, 32)), normal(1, (32, 6))
    call = functools.partial(fp4jax.einsum, "sbk,kn->nbs", recipe=recipes.e2m1_ref())
    with jax.set_mesh(mesh):
        args = jax.device_put(x, jax.P("a")), jax.device_put(w, jax.P(None, "b"))
        y = jax.jit(functools.partial(call, out_sharding=sharding))(*args)
    assert jax.typeof(y).sharding.spec == wanted
    np.testing.assert_array_equal(y, jax.jit(call)(x, w))


def test_any_dot_general_serves():
    seen = []

    def dot_general(lhs, rhs, dimension_numbers, *, out_sharding):
        seen.append((dimension_numbers, out_sharding))
        return jax.lax.dot_general(lhs, rhs, dimension_numbers)

    x, w = integers(0, (2, 3)), integers(1, (4, 3))
    y = einsum_with(dot_general, "ak,bk->ba", x, w)
    np.testing.assert_array_equal(y, jnp.einsum("ak,bk->ba", x, w))
    assert seen == [((((1,), (1,)), ((), ())), None)]


@pytest.mark.parametrize(
    "spec, shapes, error, message",
    [
        (("a", "b"), ((2,), (2,)), TypeError, "spec must be a string"),
        ("ab->a", ((2, 2), (2,)), ValueError, "two operands, got 1"),
        ("a,b,c->abc", ((2,), (2,)), ValueError, "two operands, got 3"),
        ("a,b,c->abc", ((2,), (2,), (2,)), ValueError, "must be two, got 3 .*another"),
        ("a1,b->ab", ((2,), (2,)), ValueError, "spec must be made of letters"),
        ("a,b->a,b", ((2,), (2,)), ValueError, "spec must be made of letters"),
        ("a..,b->ab", ((2,), (2,)), ValueError, "spec must be made of letters"),
        ("...a...,b", ((2,), (2,)), ValueError, "at most one '...'"),
        ("ab,bc->ad", ((2, 2), (2, 2)), ValueError, "label of the result.*'d'"),
        ("ab,bc->aa", ((2, 2), (2, 2)), ValueError, "result must repeat"),
        ("ab,bc", ((2, 3), (4, 2)), ValueError, "label 'b' must be.* 3 in lhs and 4"),
        ("aa,ab", ((2, 3), (2, 2)), ValueError, "repeated label 'a' .* 2 and 3"),
        (
            "abc,cd",
            ((2, 3), (3, 2)),
            ValueError,
            "lhs must have one.*'abc', got ndim=2",
        ),
        ("ab,b", ((2, 3), (3, 2)), ValueError, "rhs must have one.*'b', got ndim=2"),
        (
            "a,abc...",
            ((2,), (2, 3)),
            ValueError,
            r"rhs must have.*'abc...', got ndim=2",
        ),
    ],
)
def test_bad_specs_raise(spec, shapes, error, message):
    with pytest.raises(error, match=f"einsum: .*{message}"):
        fp4jax.einsum(spec, *map(jnp.ones, shapes))
