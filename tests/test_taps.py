"""Captured operands: their values, and that capture changes no number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax
import fp4jax.nnx
from fp4jax import Operands, policies, recipes, stats, taps
from fp4jax.models import Transformer
from fp4jax.numerics import Site
from fp4jax.recipes import Dgrad, Wgrad
from tests.cases import SMALL

TOKENS = jax.random.randint(jax.random.key(0), (2, 16), 0, SMALL.vocab_size)
# Otherwise the compiler may keep float32 where a program says bfloat16.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


class Net(nnx.Module):
    """Every kind of layer that multiplies."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.heads = nnx.LinearGeneral((2, 8), (4, 3), axis=(-2, -1), rngs=rngs)
        self.mix = nnx.Einsum("bthe,hef->tbf", (4, 3, 5), rngs=rngs)
        self.unused = nnx.Linear(2, 2, rngs=rngs)

    def hidden(self, x):
        x = jnp.tanh(self.first(x))
        return x, self.heads(x.reshape(*x.shape[:-1], 2, 8))

    def __call__(self, x):
        return self.mix(self.hidden(x)[1])


def net_loss(net, x):
    return jnp.sum(jnp.sin(net(x)))


X = jax.random.normal(jax.random.key(1), (3, 7, 8))
NET = Net(nnx.Rngs(0))
USED = "[fhm]*"


def transformer(remat="none", policy=policies.ufp4):
    config = dataclasses.replace(SMALL, remat=remat)
    return Transformer(config, policy(config), rngs=nnx.Rngs(0))


def transformer_loss(model, tokens, step):
    fp4jax.nnx.set_step(model, step)
    logits = model(tokens)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Values.


def test_operands_are_those_of_an_explicit_vjp():
    found = fp4jax.capture(net_loss, NET, X, layers=USED)
    hidden, heads = NET.hidden(X)
    d_mix = jnp.cos(NET(X))
    (d_heads,) = jax.vjp(NET.mix, heads)[1](d_mix)
    from_hidden = lambda x: NET.heads(x.reshape(3, 7, 2, 8))
    (d_hidden,) = jax.vjp(from_hidden, hidden)[1](d_heads)
    d_first = d_hidden * (1 - hidden**2)
    expected = {
        "first": (X.reshape(21, 8), NET.first.kernel[...], d_first.reshape(21, 16)),
        "heads": (
            hidden.reshape(21, 16),
            NET.heads.kernel[...].reshape(16, 12),
            d_heads.reshape(21, 12),
        ),
        "mix": (
            heads.reshape(21, 12),
            NET.mix.kernel[...].reshape(12, 5),
            d_mix.swapaxes(0, 1).reshape(21, 5),
        ),
    }
    assert found.keys() == expected.keys()
    for path, arrays in expected.items():
        operands = found[path]
        triple = (operands.x, operands.w, operands.dy)
        for a, b in zip(triple, arrays, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_scanned_layer_is_captured(remat):
    model = transformer(remat, policies.bf16)
    graph, state = nnx.split(model)

    @jit
    def step(state):
        model = nnx.merge(graph, state, copy=True)
        return taps.value_and_grad(transformer_loss)(model, TOKENS, jnp.int32(0))

    (_, found), grads = step(state)
    assert len(found) == 7
    kernels = nnx.state(model, nnx.Param)["stacks"][0]
    for path, operands in found.items():
        _, _, block, name = path.split("/")
        assert operands.stack == 1
        assert_equal(operands.w, kernels[block][name]["kernel"].get_value())
        # dw = x^T dy of bfloat16 operands with float32 sums, in another order.
        expected = jnp.einsum(
            "lmk,lmn->lkn", *(v.astype(jnp.float32) for v in (operands.x, operands.dy))
        )
        dw = grads["stacks"][0][block][name]["kernel"].get_value()
        np.testing.assert_allclose(dw, expected, rtol=1e-4, atol=1e-7, err_msg=path)


def test_layers_of_a_vmap_are_stacked():
    @nnx.vmap
    def make(key):
        return nnx.Linear(4, 3, rngs=nnx.Rngs(params=key))

    experts = make(jax.random.split(jax.random.key(0), 5))

    def loss_fn(experts, x):
        return jnp.sum(nnx.vmap(lambda e, x: e(x))(experts, x) ** 2)

    x = jax.random.normal(jax.random.key(1), (5, 6, 4))
    (found,) = fp4jax.capture(loss_fn, experts, x).values()
    assert found.stack == 1
    assert_equal(found.x, x)
    y = nnx.vmap(lambda e, x: e(x))(experts, x)
    np.testing.assert_allclose(found.dy, 2 * y, rtol=1e-6)


# Capture changes nothing.


def test_loss_and_gradients_are_equal_bit_for_bit():
    # Two stacks, of NVFP4 and of BF16 layers, scanned and rematerialized.
    graph, state = nnx.split(transformer("full", policies.nvfp4))

    @jit
    def plain(state, step):
        model = nnx.merge(graph, state, copy=True)
        return nnx.value_and_grad(transformer_loss)(model, TOKENS, step)

    @jit
    def captured(state, step):
        model = nnx.merge(graph, state, copy=True)
        (loss, _), grads = taps.value_and_grad(transformer_loss)(model, TOKENS, step)
        return loss, grads

    step = jnp.int32(3)
    assert_equal(captured(state, step), plain(state, step))


def test_the_model_and_its_program_stay_as_they_were():
    model = transformer()
    graph, state = nnx.split(model)

    def lowered():
        graph, state = nnx.split(model)

        def step(state, step):
            model = nnx.merge(graph, state, copy=True)
            return nnx.value_and_grad(transformer_loss)(model, TOKENS, step)

        return jax.jit(step).lower(state, jnp.int32(0)).as_text()

    before = lowered()
    fp4jax.capture(transformer_loss, model, TOKENS, jnp.int32(0), layers="*down")
    assert lowered() == before
    assert nnx.graphdef(model) == graph
    assert_equal(nnx.state(model, nnx.Param), nnx.filter_state(state, nnx.Param))


# What cannot be captured.


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ValueError, match=r"layers='\*down'.* The layers are .*first"):
        fp4jax.capture(net_loss, NET, X, layers="*down")


def test_a_layer_that_is_not_called():
    with pytest.raises(ValueError, match="must be called by loss_fn, got none of 'unu"):
        fp4jax.capture(net_loss, NET, X)


LAYER = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
TWICE = {
    "twice": lambda layer, x: jnp.sum(layer(layer(x))),
    "scan": lambda layer, x: jnp.sum(
        jax.lax.scan(lambda x, _: (layer(x), None), x, length=3)[0]
    ),
    "lanes": lambda layer, x: jnp.sum(jax.vmap(layer)(x)),
}


@pytest.mark.parametrize("loss_fn", TWICE.values(), ids=TWICE)
def test_a_layer_called_several_times_raises_or_is_nan(loss_fn):
    x = jnp.ones((3, 4))
    with pytest.raises(ValueError, match="called once in a step, got [23] calls of"):
        fp4jax.capture(loss_fn, LAYER, x)
    graph, state = nnx.split(LAYER)
    jitted = jax.jit(lambda s: fp4jax.capture(loss_fn, nnx.merge(graph, s), x))
    assert all(jnp.isnan(v).all() for v in jax.tree.leaves(jitted(state)))


def test_a_layer_that_does_not_contribute_to_the_loss_raises():
    loss_fn = lambda layer, x: jnp.sum(jax.lax.stop_gradient(layer(x)))
    with pytest.raises(ValueError, match=r"must contribute to the loss, got .*\(0 ti"):
        fp4jax.capture(loss_fn, LAYER, jnp.ones((3, 4)))


def test_a_class_that_hides_the_tap():
    cls = lambda: jax.lax.dot_general
    layer = nnx.LinearGeneral(4, 4, dot_general_cls=cls, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must not have a dot_general_cls"):
        fp4jax.capture(net_loss, layer, jnp.ones((3, 4)))


# Summaries.


def random_operands(*stack):
    keys = jax.random.split(jax.random.key(5), 3)
    shapes = ((48, 32), (32, 64), (48, 64))
    return Operands(
        *(
            jax.random.normal(k, (*stack, *s))
            for k, s in zip(keys, shapes, strict=True)
        ),
        stack=len(stack),
    )


@pytest.mark.parametrize("name", ["quartet2", "ti2d"])
def test_summary_quantizes_along_the_contraction_of_each_gemm(name):
    recipe, key = getattr(recipes, name)(), jax.random.key(7)
    operands = random_operands()
    found = fp4jax.summarize(operands, recipe, key=key)
    x, w, dy = operands.x, operands.w, operands.dy

    @functools.partial(jax.jit, static_argnums=1)
    def rounded(rows, site):
        q = fp4jax.quantize(rows, recipe.sites[site], key=key, site=site)
        return fp4jax.dequantize(q)

    x_source, w_source = x, w
    if name == "quartet2":  # which goes on from what fprop made of them
        x_source, w_source = rounded(x, Site.FPROP_X), rounded(w.T, Site.FPROP_W).T
    shared = name == "ti2d"  # whose squares serve both GEMMs
    wgrad_dy = (dy, dy, Site.DGRAD_DY) if shared else (dy.T, dy.T, Site.WGRAD_DY)
    expected = {
        "fprop_x": (x, x, Site.FPROP_X),
        "fprop_w": (w.T, w.T, Site.FPROP_W),
        "dgrad_dy": (dy, dy, Site.DGRAD_DY),
        "dgrad_w": (w, w_source, Site.DGRAD_W),
        "wgrad_x": (x.T, x_source.T, Site.WGRAD_X),
        "wgrad_dy": wgrad_dy,
    }
    assert list(found) == list(expected)
    for site, (original, source, quantized_as) in expected.items():
        qsnr = stats.qsnr(original, rounded(source, quantized_as))
        np.testing.assert_allclose(found[site]["qsnr"], qsnr, rtol=1e-5, err_msg=site)


def test_summary_of_stacked_layers_is_that_of_each():
    wgrad = recipes.e2m1_ref().wgrad  # rotated, and one operand is stochastic
    stacked, recipe = random_operands(3), recipes.Recipe(wgrad=wgrad)
    summarize = jax.jit(functools.partial(fp4jax.summarize, recipe=recipe))
    found = summarize(stacked, key=jax.random.key(7))
    for i in range(3):
        layer = Operands(stacked.x[i], stacked.w[i], stacked.dy[i])
        one = summarize(layer, key=jax.random.key(7))
        lane = jax.tree.map(lambda x, i=i: x[i], found)
        close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=3e-6)
        jax.tree.map(close, lane, one)
    assert fp4jax.summarize(stacked, recipes.bf16()) == {}


def test_a_step_returns_summaries_as_values():
    fprop = recipes.Recipe(recipes.e2m1_ref().fprop)
    graph, state = nnx.split(transformer())

    @jit
    def step(state):
        model = nnx.merge(graph, state, copy=True)
        found = fp4jax.capture(
            transformer_loss, model, TOKENS, jnp.int32(1), layers="*down"
        )
        return {
            path: fp4jax.summarize(operands, fprop) for path, operands in found.items()
        }

    ((path, sites),) = step(state).items()
    assert path == "stacks/0/mlp/down" and set(sites) == {"fprop_x", "fprop_w"}
    for figures in sites.values():
        assert figures["qsnr"].shape == (SMALL.num_layers,)
        assert (figures["qsnr"] > 10).all() and (figures["nonfinite_rate"] == 0).all()


def test_a_summary_says_what_it_takes():
    with pytest.raises(TypeError, match="Operands of one layer, got dict. fp4jax.cap"):
        fp4jax.summarize({"": random_operands()}, recipes.bf16())
    with pytest.raises(TypeError, match="summarize: recipe must be a Recipe, got 'u"):
        fp4jax.summarize(random_operands(), "ufp4")


def test_a_summary_says_where_operands_are_not_exact_in_fp8():
    recipe = dataclasses.replace(recipes.mxfp4(), compute="fp8")
    recipe = dataclasses.replace(recipe, dgrad=Dgrad(), wgrad=Wgrad())
    x = jnp.ones((32, 64)).at[:, 32:].multiply(2.0**-20)
    operands = Operands(x, jnp.ones((64, 32)), jnp.ones((32, 32)))
    found = fp4jax.summarize(operands, recipe)
    rates = {site: float(figures["fp8_fallback"]) for site, figures in found.items()}
    assert rates == {"fprop_x": 1, "fprop_w": 0}


@pytest.mark.parametrize("axis, site", [(0, "wgrad_dy"), (1, "dgrad_dy")])
def test_a_shared_dy_is_exact_in_fp8_along_the_contraction(axis, site):
    recipe = dataclasses.replace(recipes.ti2d(), compute="fp8")
    near, far = jnp.ones((32, 32)), jnp.full((32, 32), 2.0**-20)
    dy = jnp.concatenate([near, far], axis)
    operands = Operands(jnp.ones((len(dy), 32)), jnp.ones((32, dy.shape[1])), dy)
    found = fp4jax.summarize(operands, recipe, key=jax.random.key(0))
    assert [name for name in found if found[name]["fp8_fallback"]] == [site]
