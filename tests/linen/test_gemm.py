"""Layers given a quantized product: its noise, its key, and the loops around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fp4jax
from fp4jax import recipes
from fp4jax.linen import DotGeneral, Einsum, dot_general_cls
from fp4jax.numerics import UNIFORM, Quantizer, Stochastic

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 32))
SR = Quantizer(UNIFORM, rounding=Stochastic())
# Draws in the backward pass only, and compiles fast.
DRAWS = recipes.Recipe(dgrad=recipes.Dgrad(dy=SR), wgrad=recipes.Wgrad(dy=SR))
FORWARD = recipes.Recipe(recipes.Fprop(x=SR))
CLS = dot_general_cls(DRAWS)


class Block(nn.Module):
    """Gives each layer the same kernel and input, so only noise sets them apart."""

    @nn.compact
    def __call__(self, x, _=None):
        layers = (
            nn.Dense(
                32,
                use_bias=False,
                kernel_init=nn.initializers.orthogonal(),
                dot_general_cls=CLS,
                name=name,
            )
            for name in ("first", "second")
        )
        first, second = layers
        return x + first(x) + second(x), None


def grads(model, variables, key=KEY):
    loss = lambda v: jnp.sum(model.apply(v, X, rngs={"quant": key})[0] ** 2)
    return jax.grad(loss)(variables)["params"]


def differ(a, b):
    return np.mean(np.asarray(a) != np.asarray(b)) > 0.5


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def block():
    """A block whose two layers have equal kernels, and the gradients of steps."""
    variables = Block().init(KEY, X)
    kernels = variables["params"]
    variables = {"params": {"first": kernels["first"], "second": kernels["first"]}}
    step = jax.jit(functools.partial(grads, Block()))
    return variables, [step(variables, jax.random.key(i)) for i in (0, 1, 0)]


def test_equals_the_function_with_the_keys_that_layers_draw(block):
    variables, (found, *_) = block
    dense = nn.Dense(32, use_bias=False, dot_general_cls=CLS)
    kernel = variables["params"]["first"]["kernel"]

    class Spy(nn.Module):
        @nn.compact
        def __call__(self, *args, **kwargs):
            return self.make_rng("quant")

    key = nn.Dense(32, use_bias=False, dot_general_cls=lambda: Spy(name="DotGeneral_0"))
    key = key.apply({"params": {"kernel": kernel}}, X, rngs={"quant": KEY})
    loss = lambda w: jnp.sum(
        dense.apply({"params": {"kernel": w}}, X, rngs={"quant": KEY})
    )
    dims = (((1,), (0,)), ((), ()))
    explicit = lambda w: jnp.sum(fp4jax.dot_general(X, w, dims, recipe=DRAWS, key=key))
    np.testing.assert_array_equal(jax.grad(loss)(kernel), jax.grad(explicit)(kernel))
    assert differ(found["first"]["kernel"], jax.grad(loss)(kernel))


def test_layers_and_steps_draw_noise_of_their_own(block):
    _, (first, second, again) = block
    assert differ(first["first"]["kernel"], first["second"]["kernel"])
    for name in ("first", "second"):
        assert differ(first[name]["kernel"], second[name]["kernel"])
    assert_trees_equal(first, again)


def test_two_calls_of_one_layer_draw_noise_of_their_own():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(32, dot_general_cls=dot_general_cls(FORWARD))
            return layer(x), layer(x)

    first, second = Twice().init_with_output({"params": KEY, "quant": KEY}, X)[0]
    assert differ(first, second)


SPLIT = {"params": True, "quant": True}


def scanned(block, split=True, length=3):
    axes, splits = {"params": 0}, {"params": True, "quant": split}
    return nn.scan(block, variable_axes=axes, split_rngs=splits, length=length)


def mapped(block, split=True):
    return nn.vmap(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "quant": split},
        axis_size=3,
        in_axes=None,
    )


def remat(block):
    return nn.remat(block, prevent_cse=False)


def by_function(block, split=True):
    """The loop over a function of a module, as in Flax's guide."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = nn.remat(lambda module, x, _: block(name="block")(x))
            return scanned(body, split)(self, x, None)

    return Net


LOOPS = {
    "scan": scanned,
    "scan of remat": lambda block, split: scanned(remat(block), split),
    "remat of scan": lambda block, split: remat(scanned(block, split)),
    "scan of jit": lambda block, split: scanned(nn.jit(block), split),
    "scan of scan": lambda block, split: scanned(scanned(block), split, length=2),
    "scan of a function": by_function,
    "vmap": mapped,
    "vmap of remat": lambda block, split: mapped(remat(block), split),
}
# Flax forks the streams at `nn.jit`, so that its noise is another.
SAME = ("scan of remat", "remat of scan")


@pytest.fixture(scope="module")
def stack():
    """Three layers of equal kernels, scanned, and their gradients."""
    model = scanned(Block)()
    kernel = model.init(KEY, X)["params"]["first"]["kernel"][:1]
    kernel = jnp.broadcast_to(kernel, (3, 32, 32)) * 0
    variables = {"params": {name: {"kernel": kernel} for name in ("first", "second")}}
    return variables, jax.jit(functools.partial(grads, model))(variables, KEY)


def test_layers_of_a_scan_draw_noise_of_their_own(stack):
    # With kernels of zero all layers have the same input, and the same cotangent.
    found = stack[1]["first"]["kernel"]
    assert differ(found[0], found[1]) and differ(found[1], found[2])


@pytest.mark.parametrize("name", SAME)
def test_remat_leaves_the_noise_of_a_scan_as_it_is(stack, name):
    variables, wanted = stack
    model = LOOPS[name](Block, True)()
    found = jax.jit(functools.partial(grads, model))(variables, KEY)
    assert_trees_equal(found, wanted)


def test_eager_equals_jit(stack):
    variables, wanted = stack
    assert_trees_equal(grads(scanned(Block)(), variables), wanted)


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "grad"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_repeats_noise_raises(name, differentiated):
    model = LOOPS[name](Block, False)()
    variables = jax.eval_shape(model.init, KEY, X)  # needs no key, so it draws none
    apply = lambda v, key: jnp.sum(model.apply(v, X, rngs={"quant": key})[0])
    apply = jax.grad(apply) if differentiated else apply
    with pytest.raises(ValueError, match="split_rngs must have {'quant': True}"):
        jax.eval_shape(apply, variables, KEY)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_splits_noise_does_not_raise(name):
    model = LOOPS[name](Block, True)()
    variables = jax.eval_shape(model.init, KEY, X)
    step = functools.partial(grads, model)
    jax.eval_shape(step, variables, KEY)
    keys = jax.eval_shape(lambda: jax.random.split(KEY, 2))
    jax.eval_shape(jax.vmap(step, in_axes=(None, 0)), variables, keys)


def test_a_recipe_that_draws_nothing_asks_no_loop_to_split():
    dense = functools.partial(nn.Dense, 32)
    quiet = dot_general_cls(recipes.Recipe(recipes.Fprop(x=Quantizer(UNIFORM))))

    class Quiet(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return dense(dot_general_cls=quiet)(x), None

    model = scanned(Quiet, False)()
    jax.eval_shape(functools.partial(grads, model), jax.eval_shape(model.init, KEY, X))


def test_a_key_that_is_a_constant_of_the_compiled_function_raises():
    model = nn.Dense(8, dot_general_cls=CLS)
    variables = model.init(KEY, X)
    apply = lambda v: model.apply(v, X, rngs={"quant": KEY})
    with pytest.raises(ValueError, match="'quant' must be an argument of the compiled"):
        jax.jit(apply)(variables)
    np.testing.assert_array_equal(apply(variables), model.apply(variables, X))
    by_step = lambda v, step: model.apply(
        v, X, rngs={"quant": jax.random.fold_in(KEY, step)}
    )
    assert jax.jit(by_step)(variables, 0).shape == (8, 8)


def test_evaluation_needs_no_key():
    model = nn.Dense(8, dot_general_cls=CLS)
    assert model.apply(model.init(KEY, X), X).shape == (8, 8)


def test_differentiating_without_a_key_raises():
    model = nn.Dense(8, dot_general_cls=CLS)
    variables = model.init(KEY, X)
    with pytest.raises(
        ValueError, match="to differentiate .* give rngs={.quant.: key}"
    ):
        jax.grad(lambda v: jnp.sum(model.apply(v, X)))(variables)


def test_a_forward_pass_that_draws_raises_without_a_key_but_initializes():
    model = nn.Dense(8, dot_general_cls=dot_general_cls(FORWARD))
    variables = model.init(KEY, X)
    with pytest.raises(ValueError, match="key must be a PRNG key for the forward"):
        model.apply(variables, X)


def test_the_key_may_be_another_layer_s_stream_only_while_initializing():
    model = nn.Dense(8, dot_general_cls=dot_general_cls(FORWARD))
    with pytest.raises(ValueError, match="key must be"):
        model.apply(model.init(KEY, X), X, rngs={"params": KEY})


@pytest.mark.parametrize(
    "spec, shape, inputs",
    [
        ("abc,cde->abde", (5, 6, 7), (3, 4, 5)),
        ("...a,ba->...b", (4, 5), (2, 3, 5)),
        ("ab,bc->ca", (5, 4), (3, 5)),
        ("ab,ab->", (3, 5), (3, 5)),
    ],
)
@pytest.mark.parametrize("use_bias", [True, False])
def test_einsum_makes_the_parameters_of_flax(spec, shape, inputs, use_bias):
    x = jax.random.normal(KEY, inputs)
    options = {"use_bias": use_bias, "bias_init": nn.initializers.normal()}
    theirs, wanted = nn.Einsum(shape, spec, **options).init_with_output(KEY, x)[::-1]
    ours, found = Einsum(shape, spec, **options).init_with_output(KEY, x)[::-1]
    assert_trees_equal(ours, theirs)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_einsum_is_quantized_with_the_kernel_as_w():
    layer = Einsum((32, 8), "ab,bc->ca", recipe=DRAWS)
    dense = DotGeneral(DRAWS)
    kernel = layer.init(KEY, X)["params"]["kernel"]

    def loss(w):
        variables = {"params": {"kernel": w, "bias": jnp.zeros(8)}}
        return jnp.sum(layer.apply(variables, X, rngs={"quant": KEY}) ** 2)

    assert differ(jax.grad(loss)(kernel), 2 * X.T @ (X @ kernel))
    assert dense.recipe == layer.recipe


def test_factories_of_one_recipe_are_equal():
    layer = lambda recipe: nn.Dense(8, dot_general_cls=dot_general_cls(recipe))
    assert layer(recipes.ufp4()) == layer(recipes.ufp4())
    assert layer(recipes.ufp4()) != layer(recipes.nvfp4())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dense(8, dot_general=dot_general_cls(recipes.ufp4())),
        nn.DenseGeneral(8, dot_general=dot_general_cls(recipes.ufp4())),
    ],
    ids=["Dense", "DenseGeneral"],
)
def test_a_factory_that_is_given_as_a_product_raises(layer):
    with pytest.raises(TypeError, match="name ends in dot_general_cls, got the oper"):
        layer.init(jax.random.key(0), X)


def test_what_is_no_recipe_raises():
    with pytest.raises(TypeError, match="recipe must be a Recipe, got 'ufp4'"):
        dot_general_cls("ufp4")
