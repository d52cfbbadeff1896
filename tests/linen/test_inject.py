"""Quantizing a model that exists: its layers, paths, methods, caches and errors."""

import functools
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from fp4jax import recipes
from fp4jax.linen import Einsum, dot_general_cls, quantize
from fp4jax.numerics import UNIFORM, Quantizer, Stochastic
from fp4jax.policies import Policy, Rule
from fp4jax.recipes import Recipe

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 16))
Q, SR = Quantizer(UNIFORM), Quantizer(UNIFORM, rounding=Stochastic())
RECIPE = Recipe(
    recipes.Fprop(x=Q, w=Q), recipes.Dgrad(dy=SR, w=Q), recipes.Wgrad(x=Q, dy=SR)
)


class Layers(nn.Module):
    """One layer of each kind, quantized by hand where there is a recipe."""

    recipe: Recipe | None = None

    @nn.compact
    def __call__(self, x):
        cls = self.recipe and dot_general_cls(self.recipe)
        einsum = functools.partial(Einsum, recipe=self.recipe)
        attention = nn.MultiHeadDotProductAttention(
            2, qkv_dot_general_cls=cls, out_dot_general_cls=cls, name="attention"
        )
        x = x + attention(x)
        x = x + nn.DenseGeneral((4, 4), dot_general_cls=cls)(x).reshape(x.shape)
        x = x + (einsum if self.recipe else nn.Einsum)((16, 16), "...a,ab->...b")(x)
        return x + nn.Dense(16, dot_general_cls=cls)(jnp.tanh(x))


class Model(nn.Module):
    """Two blocks, made in `setup`, with a second method and a mutable collection."""

    recipe: Recipe | None = None
    wrap: Callable[[type], type] = lambda kind: kind

    def setup(self):
        self.blocks = [self.wrap(Layers)(self.recipe) for _ in range(2)]
        cls = self.recipe and dot_general_cls(self.recipe)
        self.head = nn.Dense(4, dot_general_cls=cls)
        self.calls = self.variable("calls", "count", lambda: 0)

    def __call__(self, x):
        if self.is_mutable_collection("calls"):
            self.calls.value += 1
        return self.head(self.encode(x))

    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return x


VARIABLES = Model().init(KEY, X)


def value_and_grad(model):
    def loss(params, key):
        variables = VARIABLES | {"params": params}
        return jnp.sum(model.apply(variables, X, rngs={"quant": key}) ** 2)

    return jax.jit(jax.value_and_grad(loss))(VARIABLES["params"], KEY)


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def share_different(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return np.mean([np.mean(np.asarray(x) != np.asarray(y)) > 0.5 for x, y in pairs])


@pytest.fixture(scope="module")
def wanted():
    """By hand, and not at all."""
    return value_and_grad(Model(RECIPE)), value_and_grad(Model())


def test_equals_the_same_layers_quantized_by_hand(wanted):
    assert_trees_equal(value_and_grad(quantize(Model(), RECIPE)), wanted[0])
    # Some biases have gradients that are zero, or sums of dy alone.
    assert share_different(wanted[0], wanted[1]) > 0.9


def test_methods_are_quantized_however_they_are_named(wanted):
    model = quantize(Model(), RECIPE)
    apply = functools.partial(model.apply, VARIABLES, X)
    found = [apply(method=method) for method in ("encode", Model.encode, model.encode)]
    found.append(model.bind(VARIABLES).encode(X))
    by_hand = Model(RECIPE).apply(VARIABLES, X, method="encode")
    for y in found:
        np.testing.assert_array_equal(y, by_hand)


def test_the_module_is_as_it_was():
    model = quantize(Model(), RECIPE)
    assert_trees_equal(model.init(KEY, X), VARIABLES)
    assert isinstance(model, Model) and model.wrap is Model.wrap
    _, changed = model.apply(VARIABLES, X, mutable=["calls"])
    assert changed == {"calls": {"count": VARIABLES["calls"]["count"] + 1}}
    assert model == quantize(Model(), RECIPE) != quantize(Model(), recipes.bf16())
    assert hash(model) == hash(quantize(Model(), RECIPE))


def test_a_module_inside_another_has_paths_of_its_own():
    policy = Policy(recipes.bf16(), (Rule("head", RECIPE),))

    class Outer(nn.Module):
        def setup(self):
            self.inner = quantize(Model(), policy)

        def __call__(self, x):
            return self.inner(x)

    inside = {name: {"inner": values} for name, values in VARIABLES.items()}
    assert_trees_equal(Outer().init(KEY, X).keys(), VARIABLES.keys())
    y = Outer().apply(inside, X)
    np.testing.assert_array_equal(y, quantize(Model(), policy).apply(VARIABLES, X))


PATHS = ["head"] + [
    f"blocks_{i}/{name}"
    for i in range(2)
    for name in (
        *(f"attention/{projection}" for projection in ("query", "key", "value", "out")),
        "DenseGeneral_0",
        "Einsum_0",
        "Dense_0",
    )
]


@pytest.mark.parametrize("path", PATHS)
def test_each_rule_reaches_its_layer(path):
    model = quantize(Model(), Policy(Recipe(), (Rule(path, RECIPE),)))
    jax.eval_shape(model.init, KEY, X)
    jaxpr = str(jax.make_jaxpr(model.apply)(VARIABLES, X))
    assert jaxpr.count("jit[name=fp4_quantize ") == 2  # x and w of one layer


@pytest.mark.parametrize("wrap", [lambda kind: kind, nn.jit], ids=["plain", "jit"])
def test_a_rule_without_a_layer_raises_at_init(wrap):
    good = quantize(Model(wrap=wrap), Policy(RECIPE, (Rule("head", RECIPE),)))
    for _ in range(2):  # what is traced once is not forgotten
        jax.eval_shape(good.init, KEY, X)
    bad = quantize(Model(wrap=wrap), Policy(RECIPE, (Rule("haed", RECIPE),)))
    with pytest.raises(ValueError, match="pattern='haed'"):
        jax.eval_shape(bad.init, KEY, X)


def test_a_block_under_jit_is_traced_anew_for_each_policy():
    plain, scheduled = (
        Model(wrap=nn.jit),
        Policy(recipes.bf16(), (Rule("head", RECIPE),)),
    )
    first = plain.apply(VARIABLES, X)
    for policy in (RECIPE, scheduled, recipes.bf16()):
        y = quantize(plain, policy).apply(VARIABLES, X)
        np.testing.assert_array_equal(y, quantize(Model(), policy).apply(VARIABLES, X))
    np.testing.assert_array_equal(plain.apply(VARIABLES, X), first)


def test_remat_changes_no_number(wanted):
    model = quantize(Model(wrap=nn.remat), RECIPE)
    assert_trees_equal(value_and_grad(model), wanted[0])


def test_a_new_policy_replaces_the_old_one():
    again = quantize(quantize(Model(), recipes.ufp4()), RECIPE)
    assert again == quantize(Model(), RECIPE)


class Scaled(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Alone(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        return inputs @ self.param("kernel", nn.initializers.ones, (16, self.features))


def test_subclasses_of_a_layer_are_quantized_or_raise():
    ours, by_hand = (
        quantize(Scaled(4), RECIPE),
        Scaled(4, dot_general_cls=dot_general_cls(RECIPE)),
    )
    variables = by_hand.init(KEY, X)
    np.testing.assert_array_equal(ours.apply(variables, X), by_hand.apply(variables, X))
    with pytest.raises(ValueError, match="must call Dense.__call__.*Alone"):
        quantize(nn.Sequential([Alone(4)]), RECIPE).init(KEY, X)


@pytest.mark.parametrize(
    "module",
    [
        Layers(recipes.bf16()),
        nn.Dense(4, dot_general=jax.lax.dot_general),
        nn.Sequential([nn.Dense(4, dot_general_cls=dot_general_cls(RECIPE))]),
        quantize(nn.Sequential([quantize(nn.Dense(4), recipes.bf16())]), RECIPE),
    ],
    ids=["by-hand", "dot_general", "dot_general_cls", "twice"],
)
def test_layers_with_a_product_of_their_own_raise(module):
    with pytest.raises(
        ValueError, match="quantize: dot_general(_cls)? of .* must be None"
    ):
        quantize(module, RECIPE).init(KEY, X)


def test_a_model_without_layers_raises():
    with pytest.raises(ValueError, match="must have a Dense"):
        quantize(nn.LayerNorm(), RECIPE).init(KEY, X)


def test_evaluation_needs_no_key_and_differentiation_does():
    model = quantize(Model(), RECIPE)
    loss = lambda params: jnp.sum(model.apply(VARIABLES | {"params": params}, X))
    assert np.isfinite(loss(VARIABLES["params"]))
    with pytest.raises(ValueError, match="key must be a PRNG key to differentiate"):
        jax.grad(loss)(VARIABLES["params"])


@pytest.mark.parametrize(
    "module, policy, message",
    [
        (Model, RECIPE, "must be a Linen module, got the class Model"),
        (nnx.Linear(4, 2, rngs=nnx.Rngs(0)), RECIPE, "module, got Linear. An NNX mod"),
        (Model(), "ufp4", "policy must be a Policy or a Recipe, got 'ufp4'"),
    ],
)
def test_bad_arguments_raise(module, policy, message):
    with pytest.raises(TypeError, match=message):
        quantize(module, policy)


AFTERWARDS = """
import jax, jax.numpy as jnp
from flax import linen as nn
from fp4jax import linen, recipes
x, model = jnp.linspace(0, 1, 64).reshape(4, 16), nn.Dense(8)
variables = model.init(jax.random.key(0), x)
expected = model.apply(variables, x)
linen.quantize(model, recipes.ufp4()).apply(variables, x)
print(jnp.array_equal(model.apply(variables, x), expected))
"""


def test_a_model_is_not_quantized_after_another_without_assertions():
    command = [sys.executable, "-O", "-c", AFTERWARDS]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "True"
