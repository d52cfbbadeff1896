"""The table of matrix products, against the program that it describes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import fp4jax
import fp4jax.nnx
from fp4jax import explain, models, policies, recipes
from fp4jax.linen import quantize
from fp4jax.numerics import E4M3, E8M0, Scale
from fp4jax.recipes import Dgrad

CONFIG = dataclasses.replace(
    models.PRESETS["tiny"], num_layers=3, d_model=32, d_ff=48, vocab_size=64
)
RECIPES = {
    "bf16": recipes.bf16(),
    "mxfp4_tseng": recipes.mxfp4_tseng(),
    "quartet2": recipes.quartet2(),
    "ti2d": recipes.ti2d(),
    "ue5m3": recipes.ue5m3(),
    "ufp4": recipes.ufp4(),
}
RECIPES |= {
    f"{name}_packed": dataclasses.replace(RECIPES[name], residuals="packed")
    for name in ("quartet2", "ti2d", "ufp4")
}
UFP4 = RECIPES["ufp4"]


class Small(nnx.Module):
    """A layer of each kind, and products that no recipe reaches."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(20, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.linear = nnx.Linear(32, 24, rngs=rngs)
        self.einsum = nnx.Einsum("btd,dhe->bthe", (24, 4, 8), rngs=rngs)

    def __call__(self, tokens):
        x = self.einsum(self.linear(self.attention(self.embed(tokens))))
        return self.embed.attend(x.reshape(*tokens.shape, -1))


class SmallLinen(nn.Module):
    """The same of Linen."""

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
        return nn.Einsum((32, 8), "btd,de->bte", name="einsum")(nn.Dense(32)(x))


def traced_quantizations(function, *arguments) -> int:
    """Counts quantizations in a traced program, however deep."""

    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            total += eqn.params.get("name") == "fp4_quantize"
            subs = jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            )
            subs = [getattr(sub, "jaxpr", sub) for sub in subs]
            total += sum(count(sub) for sub in subs if hasattr(sub, "eqns"))
        return total

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_counts_the_quantizations_of_the_program(recipe):
    model = nnx.Linear(40, 24, rngs=nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(1))
    fp4jax.nnx.set_step(model, 3)
    x = jnp.ones((20, 40))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def gradients(params, x):
        y, vjp = jax.vjp(lambda p, x: nnx.merge(graph, p, rest)(x), params, x)
        return vjp(y)

    expected = traced_quantizations(gradients, params, x)
    assert explain(model, x).quantizations == explain(model).quantizations == expected


def test_a_transformer_with_stacks_and_a_policy():
    model = models.Transformer(CONFIG, policies.nvfp4(CONFIG), rngs=nnx.Rngs(0))
    table = explain(model, jax.ShapeDtypeStruct((2, 16), jnp.int32))
    rows = {matmul.path: matmul for matmul in table.matmuls}
    assert rows["stacks/0/mlp/up"].sizes == (1, 32, 32, 48)
    assert rows["stacks/0/mlp/up"].stack == (2,)
    assert rows["stacks/1/mlp/up"].quantizations == 0
    assert table.quantizations == 7 * 6
    unreached = [matmul for matmul in table.matmuls if not matmul.reachable]
    # Two products of attention in each stack, and the output head.
    assert [matmul.sizes[0] > 1 for matmul in unreached] == [True] * 4 + [False]
    assert "_logits" in unreached[-1].path


def test_an_nnx_model():
    model = Small(rngs=nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, recipes.nvfp4(), rngs=nnx.Rngs(1))
    table = explain(model, jnp.zeros((2, 9), jnp.int32))
    rows = {matmul.path: matmul for matmul in table.matmuls}
    assert rows["einsum"].sizes == (1, 18, 24, 32)
    assert rows["attention/out"].sizes == (1, 18, 32, 32)
    assert len([m for m in table.matmuls if not m.reachable]) == 3
    without = {matmul.path: matmul.sizes for matmul in explain(model).matmuls}
    assert without["einsum"] == (None, None, 24, 32)
    assert without["attention/query"] == (None, None, 32, 32)


def test_a_model_that_is_not_quantized():
    table = explain(Small(rngs=nnx.Rngs(0)), jnp.zeros((2, 9), jnp.int32))
    assert table.quantizations == 0 and len(table.matmuls) == 6 + 3


def test_a_linen_model():
    x = jnp.ones((2, 9, 32))
    plain = explain(SmallLinen(), x)
    table = explain(quantize(SmallLinen(), recipes.ue5m3()), x)
    assert plain.quantizations == 0 and table.quantizations == 6 * 6
    sizes = [(matmul.path, matmul.sizes) for matmul in table.matmuls[:6]]
    assert sizes == [(matmul.path, matmul.sizes) for matmul in plain.matmuls[:6]]
    assert dict(sizes)["attention/out"] == (1, 18, 32, 32)
    assert dict(sizes)["einsum"] == (1, 18, 32, 8)
    assert [matmul.reachable for matmul in table.matmuls[6:]] == [False, False]


class Convolved(nnx.Module):
    """A layer behind two convolutions, the second of groups, and experts."""

    def __init__(self, *, rngs):
        self.image = nnx.Conv(4, 16, (3, 3), strides=2, rngs=rngs)
        self.depthwise = nnx.Conv(16, 32, (5,), feature_group_count=8, rngs=rngs)
        self.linear = nnx.Linear(32, 16, rngs=rngs)
        self.experts = fp4jax.nnx.GroupedLinear(3, 16, 8, rngs=rngs)

    def __call__(self, x):
        x = self.image(x)
        x = self.depthwise(x.reshape(len(x), -1, x.shape[-1]))
        return self.experts(self.linear(x)[0], jnp.array([4, 0, 12]))


class ConvolvedLinen(nn.Module):
    """The same of Linen, which has no experts."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), strides=2, name="image")(x)
        x = x.reshape(len(x), -1, x.shape[-1])
        x = nn.Conv(32, (5,), feature_group_count=8, name="depthwise")(x)
        return nn.Dense(16, name="linear")(x)


@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "ufp4"])
@pytest.mark.parametrize("make", [Convolved, ConvolvedLinen])
def test_convolutions_are_products_that_no_recipe_reaches(make, is_quantized):
    is_linen = make is ConvolvedLinen
    model = make() if is_linen else make(rngs=nnx.Rngs(0))
    if is_quantized and is_linen:
        model = quantize(model, UFP4)
    elif is_quantized:
        fp4jax.nnx.quantize_model(model, UFP4, rngs=nnx.Rngs(1))
    *layers, image, depthwise = explain(model, jnp.ones((2, 8, 8, 4))).matmuls
    experts = [] if is_linen else [("experts", (3, None, 16, 8))]
    found = [(matmul.path, matmul.sizes) for matmul in layers]
    assert found == [("linear", (1, 32, 32, 16)), *experts]
    assert image.sizes == (1, 2 * 4 * 4, 3 * 3 * 4, 16)
    assert depthwise.sizes == (8, 2 * 16, 5 * 2, 4)
    assert {image.compute, depthwise.compute} == {"no recipe reaches it"}
    assert "depthwise" in depthwise.path or not is_linen


class Elsewhere(nnx.Module):
    """Products of no layer, by other functions of JAX than `lax.dot_general`."""

    def __call__(self, x):
        y = jax.lax.ragged_dot(x, jnp.ones((3, 64, 8)), jnp.array([1, 3, 1]))
        x, scales = x[None].astype(jnp.float8_e4m3fn), jnp.ones((1, 5, 2))
        scales = scales.astype(jnp.float8_e8m0fnu)
        return y, jax.nn.scaled_matmul(x, x, scales, scales)


def test_products_by_other_functions():
    ragged, scaled = explain(Elsewhere(), jnp.ones((5, 64))).matmuls
    assert ragged.sizes == (3, None, 64, 8) and scaled.sizes == (1, 5, 64, 5)
    assert not (ragged.reachable or scaled.reachable)


class Direct(nnx.Module):
    """A quantized product that no layer owns, beside a layer."""

    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones((32, 16)))
        self.linear = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        y = fp4jax.einsum("kn,mk->nm", self.w[...], x, weight="lhs", recipe=UFP4)
        return self.linear(y.T)


def test_a_quantized_product_of_no_layer():
    model = Direct(rngs=nnx.Rngs(0))
    layer, direct = explain(model, jnp.ones((4, 32))).matmuls
    assert (layer.path, layer.recipe) == ("linear", None)
    assert direct.path == "(Direct.__call__, test_explanation.py)"
    assert not direct.reachable
    assert (direct.recipe, direct.sizes) == (UFP4, (1, 4, 32, 16))


@pytest.mark.parametrize("recipe", [None, UFP4], ids=["plain", "ufp4"])
def test_a_layer_that_makes_its_product(recipe):
    dot = lambda: fp4jax.nnx.DotGeneral(recipe, rngs=nnx.Rngs(1))
    cls = dot if recipe else lambda: jax.lax.dot_general
    layer = nnx.LinearGeneral(32, 8, dot_general_cls=cls, rngs=nnx.Rngs(0))
    (matmul,) = explain(nnx.Sequential(layer), jnp.ones((4, 32))).matmuls
    assert (matmul.path, matmul.recipe) == ("layers/0", recipe)
    assert matmul.sizes == (1, 4, 32, 8)


class Deaf(nnx.Linear):
    """A linear layer that does not multiply as its parent does."""

    def __call__(self, x):
        return x @ self.kernel[...]


def test_a_layer_that_the_program_does_not_call():
    model = nnx.Sequential(
        Deaf(32, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    )
    fp4jax.nnx.quantize_model(model, UFP4, rngs=nnx.Rngs(1))
    table = explain(model, jnp.ones((4, 32)))
    heard, product, deaf = table.matmuls
    assert heard.path == "layers/1" and heard.is_called and heard.quantizations == 6
    assert not product.reachable and product.recipe is None
    assert deaf.path == "layers/0" and not deaf.is_called and deaf.quantizations == 0
    assert table.quantizations == 6
    assert "no effect: not called" in str(table)


class Scanned(nn.Module):
    """Two layers of Linen under one path."""

    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "quant": True},
            length=2,
        )
        return block(name="blocks")(x)[0]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Einsum((32, 32), "btd,de->bte")(nn.Dense(32)(x)), None


@pytest.mark.parametrize("recipe", [None, UFP4], ids=["plain", "ufp4"])
def test_a_linen_scan_counts_once(recipe):
    model = Scanned() if recipe is None else quantize(Scanned(), recipe)
    table = explain(model, jnp.ones((2, 9, 32)))
    paths = ["blocks/Dense_0", "blocks/Einsum_0"]
    assert [matmul.path for matmul in table.matmuls] == paths
    assert {matmul.stack for matmul in table.matmuls} == {(2,)}
    assert {matmul.sizes for matmul in table.matmuls} == {(1, 18, 32, 32)}
    assert table.quantizations == (0 if recipe is None else 12)


@pytest.mark.parametrize("recipe", [None, UFP4], ids=["plain", "ufp4"])
def test_batch_dimensions_of_a_linen_layer(recipe):
    model = nn.DenseGeneral(8, batch_dims=(0,), use_bias=False)
    model = model if recipe is None else quantize(model, recipe)
    table = explain(model, jnp.ones((3, 16, 32)))
    (matmul,) = table.matmuls
    assert (matmul.path, matmul.sizes) == ("", (3, 16, 32, 8))
    assert "| 3 of 16 x 32 x 8 |" in str(table).replace("│", "|")


class Mapped(nnx.Module):
    """Stacked layers that all see one input, or each one of its own."""

    def __init__(self, *, rngs):
        make = lambda rngs: nnx.Linear(32, 64, rngs=rngs)
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(make))(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)


@pytest.mark.parametrize("recipe", [None, UFP4], ids=["plain", "ufp4"])
def test_stacked_layers_that_are_mapped(recipe):
    model = Mapped(rngs=nnx.Rngs(0))
    if recipe is not None:
        fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(1))
        fp4jax.nnx.set_step(model, 3)
    (matmul,) = explain(model, jnp.ones((16, 32))).matmuls
    assert (matmul.stack, matmul.sizes) == ((3,), (1, 16, 32, 64))


def test_words_say_what_a_gemm_does():
    model = nnx.Linear(40, 24, rngs=nnx.Rngs(0))
    recipe = recipes.ufp4(Scale(E8M0))
    fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(1))
    (matmul,) = explain(model, jnp.ones((20, 40))).matmuls
    assert matmul.operands("fprop") == (
        "x: UNIFORM 1x16 E8M0(truncation_free) RTNE RHT16 zeros 40 to 48",
        "w: UNIFORM 1x16 E8M0(truncation_free) RTNE RHT16 zeros 40 to 48",
    )
    assert matmul.operands("wgrad")[1].endswith("SR RHT16 zeros 20 to 32")
    fp4jax.nnx.quantize_model(model, recipes.quartet2(), rngs=nnx.Rngs(1))
    (matmul,) = explain(model).matmuls
    assert matmul.operands("dgrad")[1] == (
        "Q(w): E2M1 1x16 E4M3 fresh(255.99) MS-EDEN(128) RHT128 (signs per step)"
        " zeros 24 to 128"
    )
    half = dataclasses.replace(recipes.quartet2(), dgrad=recipes.Dgrad())
    fp4jax.nnx.quantize_model(model, half, rngs=nnx.Rngs(1))
    assert explain(model).matmuls[0].operands("dgrad") == ("dy: BF16", "Q(w): BF16")
    fp4jax.nnx.quantize_model(model, recipes.ti2d(), rngs=nnx.Rngs(1))
    assert explain(model).matmuls[0].operands("wgrad")[1] == "dy: that of dgrad"


def test_prints_shows_and_stores():
    model = Small(rngs=nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, recipes.ue5m3(), rngs=nnx.Rngs(1))
    table = explain(model, jnp.zeros((2, 9), jnp.int32))
    for text in (str(table), table._repr_html_()):
        assert "einsum" in text and "no recipe reaches it" in text and "held" in text
    rows = json.loads(json.dumps(table.to_json()))
    assert len(rows) == len(table.matmuls)
    row = next(row for row in rows if row["path"] == "linear")
    held = row["gemms"]["dgrad"]["operands"]["dy"]["tensor_scale"]
    assert held == {"type": "Held", "every": 50, "target": 448.0}
    assert row["gemms"]["wgrad"]["contraction"] == 18


@pytest.mark.parametrize(
    ("recipe", "expected", "absent"),
    [
        (recipes.ue5m3(), ["wgrad: dw = x^T dy", "SR: ", "held(n, t): "], ["RHTn"]),
        (recipes.quartet2(), ["Q(x): ", "MS-EDEN(n): ", "fresh(t): "], ["SR: "]),
        (recipes.ufp4(), ["RTNE: ", "RHTn: "], ["fresh", "zeros", "signs"]),
        (recipes.ti2d(), ["truncation_free: "], ["floor: ", "best of: "]),
        (
            recipes.mxfp4_tseng(),
            ["floor: ", "prescale p: ", "signs per step: "],
            ["truncation_free", "RTNE", "even: "],
        ),
        (recipes.four_over_six(), ["best of: "], ["floor: ", "pad 17/16: "]),
        (recipes.ufp4(Scale(E4M3)), ["pad 17/16: "], ["prescale"]),
        (recipes.ufp4(Scale(E8M0, rule="even")), ["even: "], ["floor: "]),
        (recipes.bf16(), ["x n: tokens, input and", "fprop: y = x w"], ["Operands"]),
        (None, ["x n: tokens, input and"], ["fprop: y", "Operands"]),
    ],
    ids=[
        *("ue5m3", "quartet2", "ufp4", "ti2d", "mxfp4_tseng", "four_over_six"),
        *("ufp4_e4m3", "ufp4_even", "bf16", "plain"),
    ],
)
def test_says_what_its_words_mean_and_no_others(recipe, expected, absent):
    model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
    if recipe is not None:
        fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(1))
    table = explain(model, jnp.ones((256, 128)))
    text = " ".join(table.legend)
    assert all(word in text for word in expected)
    assert not any(word in text for word in absent)
    assert text in " ".join(str(table).split())


@pytest.mark.parametrize(
    ("name", "expected"), [("ue5m3", True), ("nvfp4", True), ("ufp4", False)]
)
def test_says_that_a_tensor_amax_is_of_a_microbatch(name, expected):
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    recipe = getattr(recipes, name)()
    fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(1))
    table = fp4jax.explain(model)
    assert ("per microbatch" in str(table)) == bool(table.notes) == expected


def test_errors():
    with pytest.raises(TypeError, match="explain: model must be a Flax NNX or Linen"):
        explain(lambda x: x)
    with pytest.raises(ValueError, match="explain: inputs must be given for a Linen"):
        explain(SmallLinen())


@pytest.mark.parametrize(
    "gemms, compute",
    [({}, "fp8 where exact"), ({"dgrad": Dgrad()}, "fp8 (dgrad: bf16)")],
)
def test_says_which_gemms_stay_out_of_fp8(gemms, compute):
    recipe = dataclasses.replace(recipes.ufp4(Scale(E8M0)), compute="fp8", **gemms)
    dot = fp4jax.nnx.DotGeneral(recipe, rngs=nnx.Rngs(0))
    model = nnx.Linear(32, 32, dot_general=dot, rngs=nnx.Rngs(0))
    (matmul,) = explain(model, jnp.ones((4, 32))).matmuls
    assert matmul.compute == compute
