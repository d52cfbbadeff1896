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
from fp4jax.numerics import E8M0, Scale

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


def test_errors():
    with pytest.raises(TypeError, match="explain: model must be a Flax NNX or Linen"):
        explain(lambda x: x)
    with pytest.raises(ValueError, match="explain: inputs must be given for a Linen"):
        explain(SmallLinen())
