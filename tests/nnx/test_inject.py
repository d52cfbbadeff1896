"""Injection: which layers take a recipe, stacked ones too, and what cannot is said."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp4jax.nnx
from fp4jax import recipes
from fp4jax.policies import Policy, Rule

UFP4, NVFP4 = recipes.ufp4(), recipes.nvfp4()
X = jax.random.normal(jax.random.key(1), (2, 16, 32))


class Block(nnx.Module):
    """Every kind of layer that can be reached, and one that cannot."""

    def __init__(self, *, rngs):
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.general = nnx.LinearGeneral(32, (2, 16), rngs=rngs)
        self.einsum = nnx.Einsum("bthe,hed->btd", (2, 16, 32), (32,), rngs=rngs)
        self.linear = nnx.Linear(32, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.linear(jax.nn.gelu(self.einsum(self.general(x))))


class Model(nnx.Module):
    """Three blocks, unrolled or stacked and scanned."""

    def __init__(self, *, scan="none", remat=False, rngs):
        self.scan, self.remat = scan, remat
        if scan == "none":
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(3)])
        else:
            stack = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs=rngs)))
            self.blocks = stack(rngs)

    def __call__(self, x):
        match self.scan:
            case "none":
                for block in self.blocks:
                    x = block(x)
            case "nnx":
                run = lambda x, block: block(x)
                run = nnx.remat(run) if self.remat else run
                x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                    x, self.blocks
                )
            case "lax":
                graph, state = nnx.split(self.blocks)
                run = lambda x, state: (nnx.merge(graph, state)(x), None)
                x, _ = lax.scan(jax.checkpoint(run) if self.remat else run, x, state)
        return x


def build(policy=UFP4, **options):
    model = Model(**options, rngs=nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, policy, rngs=nnx.Rngs(7))
    return model


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def sgd(model, x, step):
    """One step of training, which changes the model."""
    fp4jax.nnx.set_step(model, step)
    value, grads = nnx.value_and_grad(loss)(model, x)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    return value


def losses(model, *, plain):
    """Three losses of training, under `jax.jit` or `nnx.jit`."""
    if not plain:
        step = nnx.jit(sgd)
        return [float(step(model, X, i)) for i in range(3)]
    graph, state = nnx.split(model)

    @jax.jit
    def step(state, i):
        model = nnx.merge(graph, state, copy=True)
        value = sgd(model, X, i)
        return nnx.state(model, nnx.Param), value

    found = []
    for i in range(3):
        params, value = step(state, i)
        nnx.update(model, params)
        state = nnx.state(model)
        found.append(float(value))
    return found


@pytest.fixture(scope="module")
def reference():
    return losses(build(scan="lax"), plain=True)


@pytest.mark.parametrize("plain", [True, False], ids=["jax.jit", "nnx.jit"])
@pytest.mark.parametrize("remat", [True, False], ids=["remat", "no remat"])
@pytest.mark.parametrize("scan", ["nnx", "lax"])
def test_scan_remat_and_jit_change_no_bit(scan, remat, plain, reference):
    found = losses(build(scan=scan, remat=remat), plain=plain)
    assert found == reference
    assert len(set(found)) == 3


def test_every_layer_takes_its_recipe():
    rules = (Rule("blocks/1/*", NVFP4), Rule("*/einsum", recipes.e2m1_ref()))
    model = build(Policy(UFP4, rules))
    found = {layer.path: layer.gemm.recipe for layer in fp4jax.nnx.layers(model)}
    names = ("attention/query", "attention/key", "attention/value", "attention/out")
    names += ("general", "einsum", "linear")
    assert set(found) == {f"blocks/{i}/{name}" for i in range(3) for name in names}
    assert {found[f"blocks/1/{name}"] for name in names} == {NVFP4}
    assert found["blocks/0/einsum"] == found["blocks/2/einsum"] == recipes.e2m1_ref()
    assert found["blocks/2/attention/out"] == UFP4


@pytest.mark.parametrize("name", ["attention", "general", "einsum", "linear"])
def test_the_recipe_of_a_layer_changes_its_result(name):
    plain = Model(rngs=nnx.Rngs(0))(X)
    rest = (Rule(f"*/{name}*", UFP4),)
    assert np.mean(np.asarray(build(Policy(recipes.bf16(), rest))(X)) != plain) > 0.9


def test_stacked_layers_get_keys_of_their_own():
    model = build(scan="lax")
    fp4jax.nnx.set_step(model, 5)
    keys = []
    for layer in fp4jax.nnx.layers(model):
        assert layer.stack == (3,)
        assert layer.gemm.step.get_value().tolist() == [5, 5, 5]
        keys.append(jax.random.key_data(layer.gemm.key.get_value()))
    assert len(np.unique(np.concatenate(keys), axis=0)) == 3 * 7


def test_a_layer_can_be_stacked_twice():
    @nnx.split_rngs(splits=(2, 3))
    @nnx.vmap
    @nnx.vmap
    def stack(rngs):
        return nnx.Linear(32, 32, rngs=rngs)

    model = stack(nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, UFP4, rngs=nnx.Rngs(0))
    assert model.dot_general.key.get_value().shape == (2, 3)


def test_quantizing_again_replaces_recipes_and_keeps_keys():
    model = build(scan="lax")
    fp4jax.nnx.set_step(model, 3)
    before = nnx.as_pure(nnx.state(model))
    fp4jax.nnx.quantize_model(model, NVFP4, rngs=nnx.Rngs(99))
    assert {layer.gemm.recipe for layer in fp4jax.nnx.layers(model)} == {NVFP4}
    chex.assert_trees_all_equal(before, nnx.as_pure(nnx.state(model)))


def test_a_model_can_be_quantized_before_it_exists():
    model = nnx.eval_shape(functools.partial(build, scan="lax"))
    shapes = {layer.gemm.key.get_value().shape for layer in fp4jax.nnx.layers(model)}
    assert shapes == {(3,)}


def custom(*args, **kwargs):
    return lax.dot_general(*args, **kwargs)


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: nnx.Linear(8, 8, dot_general=custom, rngs=rngs),
        lambda rngs: nnx.LinearGeneral(8, 8, dot_general_cls=lambda: custom, rngs=rngs),
        lambda rngs: nnx.Einsum("bi,ij->bj", (8, 8), einsum_op=custom, rngs=rngs),
    ],
    ids=["dot_general", "dot_general_cls", "einsum_op"],
)
def test_a_layer_with_a_product_of_its_own_raises(make, request):
    plain = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = nnx.Sequential(plain, make(nnx.Rngs(0)))
    name = request.node.callspec.id
    message = f"{name} must be Flax's default.* at 'layers/1'. Set the layer's {name} b"
    with pytest.raises(ValueError, match=message):
        fp4jax.nnx.quantize_model(model, UFP4, rngs=nnx.Rngs(0))
    assert plain.dot_general is lax.dot_general  # all layers or none


def test_layers_that_share_a_product_take_one_recipe():
    dot = fp4jax.nnx.DotGeneral(UFP4, rngs=nnx.Rngs(0))
    make = lambda: nnx.Linear(8, 8, dot_general=dot, rngs=nnx.Rngs(0))
    model = nnx.Sequential(make(), make())
    policy = Policy(recipes.bf16(), (Rule("layers/0", NVFP4),))
    with pytest.raises(
        ValueError, match="share a DotGeneral .*'layers/0' and 'layers/1"
    ):
        fp4jax.nnx.quantize_model(model, policy, rngs=nnx.Rngs(0))
    assert dot.recipe == UFP4
    fp4jax.nnx.quantize_model(model, NVFP4, rngs=nnx.Rngs(0))
    assert dot.recipe == NVFP4


@pytest.mark.parametrize(
    ("model", "policy", "error", "message"),
    [
        (Block, Policy(UFP4, (Rule("*/qurey", NVFP4),)), ValueError, "'\\*/qurey'"),
        (Block, "ufp4", TypeError, "must be a Policy or a Recipe, got 'ufp4'"),
        (lambda rngs: nnx.LayerNorm(8, rngs=rngs), UFP4, ValueError, "LayerNorm"),
    ],
    ids=["typo", "no policy", "no layer"],
)
def test_bad_arguments_raise(model, policy, error, message):
    with pytest.raises(error, match=message):
        fp4jax.nnx.quantize_model(model(rngs=nnx.Rngs(0)), policy, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "rngs", [0, jax.random.key(0), None], ids=["seed", "key", "none"]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: fp4jax.nnx.quantize_model(
            Block(rngs=nnx.Rngs(0)), UFP4, rngs=rngs
        ),
        lambda rngs: fp4jax.nnx.DotGeneral(UFP4, rngs=rngs),
        lambda rngs: fp4jax.nnx.Einsum(UFP4, rngs=rngs),
        lambda rngs: fp4jax.nnx.GroupedLinear(2, 8, 4, rngs=rngs),
    ],
    ids=["quantize_model", "DotGeneral", "Einsum", "GroupedLinear"],
)
def test_what_draws_no_keys_raises(make, rngs, request):
    name = request.node.callspec.id.split("-")[0]
    with pytest.raises(TypeError, match=f"^{name}: rngs must be nnx.Rngs, got"):
        make(rngs)
    with pytest.raises(
        ValueError, match=f"^{name}: rngs must have the stream .* other"
    ):
        make(nnx.Rngs(other=0))


def test_layers_stacked_along_another_axis_raise():
    stack = nnx.vmap(lambda rngs: nnx.Linear(8, 4, rngs=rngs), out_axes=1)
    model = nnx.split_rngs(splits=3)(stack)(nnx.Rngs(0))
    with pytest.raises(ValueError, match="must be the first of a kernel"):
        fp4jax.nnx.quantize_model(model, UFP4, rngs=nnx.Rngs(0))
