"""Recipes and policies as values: their tables, their JSON, their errors."""

import dataclasses
import json
import types

import pytest

from fp4jax import policies, recipes
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E8M0,
    F32,
    INT2,
    NVFP4_SIGNS,
    UE5M3,
    UNIFORM,
    FixedSigns,
    Fresh,
    Hadamard,
    PerStepSigns,
    Quantizer,
    Scale,
    Site,
    Stochastic,
)

RECIPES = {
    "bf16": recipes.bf16(),
    "e2m1_ref": recipes.e2m1_ref(),
    "ufp4": recipes.ufp4(),
    "ufp4 e8m0": recipes.ufp4(Scale(E8M0)),
    "nvfp4": recipes.nvfp4(),
    "int2": recipes.int2(),
}
DY = {Site.DGRAD_DY, Site.WGRAD_DY}
WGRAD = {Site.WGRAD_X, Site.WGRAD_DY}
W = {Site.FPROP_W, Site.DGRAD_W}


@pytest.mark.parametrize(
    "name, grid, scale, rotated, square",
    [
        ("e2m1_ref", E2M1, F32, WGRAD, set()),
        ("ufp4", UNIFORM, F32, set(Site), set()),
        ("nvfp4", E2M1, E4M3, WGRAD, W),
        ("int2", INT2, F32, set(), set()),
    ],
)
def test_sites_are_as_published(name, grid, scale, rotated, square):
    sites = RECIPES[name].sites
    assert {q.grid for q in sites.values()} == {grid}
    assert {q.scale.format for q in sites.values()} == {scale}
    assert {q.block_size for q in sites.values()} == {16}
    assert {site for site, q in sites.items() if q.is_stochastic} == DY
    assert {site for site, q in sites.items() if q.rotation} == rotated
    assert {site for site, q in sites.items() if q.is_square} == square
    assert {q.pads for q in sites.values()} == {False}


def test_nvfp4_has_two_levels_and_the_published_signs():
    sites = recipes.nvfp4().sites
    assert {q.tensor_scale for q in sites.values()} == {Fresh(448.0)}
    assert sites[Site.WGRAD_X].rotation.signs == NVFP4_SIGNS


def test_ufp4_has_one_sign_vector_for_each_gemm():
    signs = [q.rotation.signs for q in recipes.ufp4(seed=7).sites.values()]
    assert signs == [FixedSigns(7 + gemm) for gemm in (0, 0, 1, 1, 2, 2)]


def test_bf16_quantizes_nothing():
    assert set(recipes.bf16().sites.values()) == {None}
    assert not recipes.bf16().draws()


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip(name):
    text = json.dumps(recipes.to_json(RECIPES[name]))
    assert recipes.from_json(json.loads(text)) == RECIPES[name]


def test_json_round_trip_of_every_part():
    quantizer = Quantizer(UNIFORM, 32, rotation=Hadamard(32, PerStepSigns()))
    recipe = recipes.Recipe(
        recipes.Fprop(quantizer, quantizer),
        recipes.Dgrad(
            Quantizer(E4M3, (32, 32), Scale(E8M0, "even"), rounding=Stochastic())
        ),
        recipes.Wgrad(Quantizer(E2M1, scale=Scale(UE5M3), tensor_scale=Fresh(2048.0))),
        compute="f32",
    )
    policy = policies.Policy(recipe, (policies.Rule("blocks/0/*", recipes.bf16()),))
    assert recipes.from_json(json.loads(json.dumps(recipes.to_json(policy)))) == policy


@pytest.mark.parametrize(
    "data, message",
    [
        ({"type": "Recip"}, "type must be one of .*'Recipe'.*got type='Recip'"),
        ({"target": 448.0}, "type must be one of .*'Recipe'.*got type=None"),
        ({"type": ["Recipe"]}, r"type must be one of .*got type=\['Recipe'\]"),
        ({"type": 1}, "type must be one of .*got type=1"),
        ({"format": "E3M0"}, "format must be one of .*'E2M1'.*got format='E3M0'"),
        ({"format": []}, r"format must be one of .*'E2M1'.*got format=\[\]"),
        ({"format": "E2M1", "x": 1}, r"format must be 'format' alone, got .*'x'"),
        ({"type": "Fresh", "targt": 448}, r"Fresh must be among \['target'\].*targt"),
        (
            {"type": "Rule", "pattern": "*"},
            r"Rule must include \['pattern', 'recipe'\], got \['pattern'\]. Add \['rec",
        ),
    ],
    ids=[
        "type",
        "type-missing",
        "type-list",
        "type-number",
        "format",
        "format-list",
        "format-field",
        "field",
        "field-missing",
    ],
)
def test_unknown_json_raises(data, message):
    with pytest.raises(ValueError, match=f"^from_json: .*{message}"):
        recipes.from_json(data)


@pytest.mark.parametrize("value", [3 + 2j, {"a": 1}, [1], Fresh, Site, object()])
def test_foreign_values_have_no_json(value):
    with pytest.raises(TypeError, match="^to_json: value must be a recipe, a policy"):
        recipes.to_json(value)


@pytest.mark.parametrize("make", [recipes.e2m1_ref, recipes.ufp4])
def test_a_scale_of_3_mantissa_bits_is_two_level(make):
    quantizers = make(Scale(E4M3)).sites.values()
    assert {q.tensor_scale for q in quantizers} == {Fresh()}
    assert {q.tensor_scale for q in make(Scale(E8M0)).sites.values()} == {None}


@pytest.mark.parametrize("make", [recipes.e2m1_ref, recipes.ufp4, recipes.mxfp4])
def test_a_scale_must_be_one(make):
    with pytest.raises(TypeError, match="scale must be Scale, got scale='E8M0'"):
        make("E8M0")


def test_values_are_hashable_and_compare_by_content():
    assert recipes.ufp4() == recipes.ufp4()
    assert len({recipes.ufp4(), recipes.ufp4(), recipes.ufp4(seed=1)}) == 2


def test_both_operands_of_a_gemm_have_one_rotation():
    plain = Quantizer(E2M1)
    rotated = dataclasses.replace(plain, rotation=Hadamard())
    with pytest.raises(ValueError, match="Dgrad: both operands must have the same"):
        recipes.Dgrad(dy=rotated, w=plain)
    with pytest.raises(ValueError, match="Fprop: both operands must have the same"):
        recipes.Fprop(x=rotated)


POLICY_FIELDS = {
    "pattern": (
        lambda: policies.Rule(3, recipes.bf16()),
        "Rule: pattern must be a str, got 3",
    ),
    "rule-recipe": (
        lambda: policies.Rule("*", "bf16"),
        "Rule: recipe must be a Recipe, got 'bf16'",
    ),
    "default": (
        lambda: policies.Policy(None),
        "Policy: default must be a Recipe, got None",
    ),
    "rules-list": (
        lambda: policies.Policy(recipes.bf16(), []),
        r"Policy: rules must be a tuple, got \[\]",
    ),
    "rule-of-rules": (
        lambda: policies.Policy(recipes.bf16(), ("blocks/*",)),
        r"Policy: rules\[0\] must be a Rule, got 'blocks/\*'",
    ),
}


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: recipes.Recipe(compute="int8"), ValueError, "compute must be.*'int8'"),
        (lambda: recipes.Recipe(recipes.Dgrad()), TypeError, "fprop must be a Fprop"),
        (lambda: recipes.Fprop(x="E2M1"), TypeError, "operands must be Quantizer"),
        *((make, TypeError, message) for make, message in POLICY_FIELDS.values()),
    ],
    ids=["compute", "gemm", "quantizer", *POLICY_FIELDS],
)
def test_bad_fields_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


def model(num_layers):
    paths = [
        f"blocks/{i}/mlp/{site}" for i in range(num_layers) for site in ("up", "down")
    ]
    return types.SimpleNamespace(num_layers=num_layers, layer_paths=paths)


@pytest.mark.parametrize("layers, kept", [(2, 1), (4, 1), (10, 2), (52, 8), (62, 9)])
def test_nvfp4_policy_keeps_the_last_blocks(layers, kept):
    policy = policies.nvfp4(model(layers))
    high = [
        policy.recipe(f"blocks/{i}/mlp/up") == recipes.bf16() for i in range(layers)
    ]
    assert high == [False] * (layers - kept) + [True] * kept


@pytest.mark.parametrize("layers", [0, 1])
def test_nvfp4_policy_refuses_models_of_which_nothing_is_left(layers):
    message = f"leave a block to quantize, .* last=1 of num_layers={layers}. Use"
    with pytest.raises(ValueError, match=message):
        policies.nvfp4(model(layers))


@pytest.mark.parametrize("seed", [-1, 2**32 - 2, 1.0, "0", True, None])
def test_ufp4_refuses_seeds_of_which_one_is_out_of_range(seed):
    message = r"^ufp4: seed must be an integer in \[0, 2\^32 - 2\), got seed="
    with pytest.raises(ValueError, match=message):
        recipes.ufp4(seed=seed)
    recipes.ufp4(seed=2**32 - 3)


@pytest.mark.parametrize("name", policies.PRESETS)
def test_presets_apply_the_recipe_of_their_name(name):
    policy = policies.PRESETS[name](model(8))
    assert policy.recipe("blocks/0/mlp/up") == getattr(recipes, name)()
    assert recipes.from_json(recipes.to_json(policy)) == policy


def test_the_first_matching_rule_wins():
    rules = (
        policies.Rule("*/attention/*", recipes.ufp4()),
        policies.Rule("blocks/1/*", recipes.bf16()),
    )
    policy = policies.Policy(recipes.nvfp4(), rules)
    assert policy.recipe("blocks/1/attention/key") == recipes.ufp4()
    assert policy.recipe("blocks/1/mlp/up") == recipes.bf16()
    assert policy.recipe("blocks/11/mlp/up") == recipes.nvfp4()


def test_a_rule_that_matches_nothing_raises_with_the_layers():
    policy = policies.Policy(recipes.ufp4(), (policies.Rule("hed", recipes.bf16()),))
    layers = ("attention/query", "mlp/up")
    paths = [f"blocks/{i}/{layer}" for i in range(11) for layer in layers]
    message = (
        "^Policy: every rule must be the first to match some layer, got "
        "pattern='hed'. The layers are head, blocks/{0..10}/attention/query, "
        "blocks/{0..10}/mlp/up.$"
    )
    with pytest.raises(ValueError, match=message):
        policy.check(path for path in (*paths, "head"))
    policies.Policy(
        recipes.ufp4(), (policies.Rule("blocks/1/*", recipes.bf16()),)
    ).check(paths)


def test_a_rule_behind_a_wider_one_raises():
    rules = (
        policies.Rule("*", recipes.ufp4()),
        policies.Rule("blocks/0/*", recipes.bf16()),
    )
    policy = policies.Policy(recipes.ufp4(), rules)
    message = "pattern='blocks/0/\\*'. Rules before it match 'blocks/0/mlp/up' as well."
    with pytest.raises(ValueError, match=f"first to match.*{message}"):
        policy.check(["blocks/0/mlp/up", "blocks/1/mlp/up"])


def test_text_that_nobody_has_parsed_is_refused():
    text = json.dumps(recipes.to_json(recipes.ufp4()))
    with pytest.raises(TypeError, match="must be what json.loads returns"):
        recipes.from_json(text)
