"""Policies made from others, and schedules of them."""

import json
import types

import pytest

from fp4jax import policies, recipes
from fp4jax.numerics import Site
from fp4jax.policies import Policy, Rule, Schedule
from fp4jax.recipes import Dgrad, Fprop

BF16, UFP4, NVFP4 = recipes.bf16(), recipes.ufp4(), recipes.nvfp4()
FP4, FINISH = Policy(UFP4), Policy(BF16)
SCHEDULE = Schedule(((0, FP4), (5, FINISH)))


def paths(layers):
    return [f"blocks/{i}/mlp/{site}" for i in range(layers) for site in ("up", "down")]


def model(layers):
    return types.SimpleNamespace(num_layers=layers, layer_paths=paths(layers))


def test_keep_leaves_first_and_last_blocks_in_bf16():
    policy = policies.keep(FP4, model(12), first=1, last=2)
    policy.check(paths(12))
    kept = [i for i in range(12) if policy.recipe(f"blocks/{i}/mlp/up") == BF16]
    assert kept == [0, 10, 11]
    assert policy.recipe("blocks/1/mlp/up") == UFP4


def test_keep_drops_rules_that_only_concern_blocks_kept():
    rules = (
        Rule("blocks/3/mlp/down", NVFP4),
        Rule("blocks/1/*", NVFP4),
        Rule("*/mlp/down", NVFP4),
    )
    policy = policies.keep(Policy(UFP4, rules), model(4), last=1)
    policy.check(paths(4))
    assert [rule.pattern for rule in policy.rules] == [
        "blocks/3/*",
        "blocks/1/*",
        "*/mlp/down",
    ]


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (0, -1), (2, 2), (4, 0)])
def test_keep_leaves_a_block_to_quantize(first, last):
    with pytest.raises(ValueError, match=f"first={first}, last={last} of num_layers=4"):
        policies.keep(FP4, model(4), first=first, last=last)


@pytest.mark.parametrize(
    "policy", [policies.nvfp4, policies.ue5m3, policies.ti2d], ids=lambda p: p.__name__
)
def test_policies_of_layers_want_a_config(policy):
    name = policy.__name__
    with pytest.raises(TypeError, match=f"{name}: config must have .*, got str"):
        policy("my model")
    with pytest.raises(TypeError, match="keep: config must have .*, got str"):
        policies.keep(FP4, "my model", last=1)


def test_bf16_forward_changes_fprop_alone():
    policy = policies.bf16_forward(Policy(UFP4, (Rule("*/up", NVFP4),)))
    for recipe, original in (
        (policy.default, UFP4),
        (policy.recipe("blocks/0/mlp/up"), NVFP4),
    ):
        assert recipe.fprop == Fprop()
        assert (recipe.dgrad, recipe.wgrad) == (original.dgrad, original.wgrad)
        assert recipe.dgrad != Dgrad()


def test_bf16_forward_quantizes_the_backward_pass_from_the_originals():
    policy = policies.bf16_forward(Policy(recipes.quartet2()))
    assert policy.default.source == "original"
    assert policy.default.draws(Site.WGRAD_X)


@pytest.mark.parametrize(("layers", "wider"), [(12, [8, 9, 10, 11]), (2, [0, 1])])
def test_ue5m3_has_another_target_in_the_last_four_mlp_downs(layers, wider):
    policy = policies.ue5m3(model(layers))
    policy.check(paths(layers))
    found = {path: policy.recipe(path).wgrad.dy.tensor_scale for path in paths(layers)}
    expected = {f"blocks/{i}/mlp/down" for i in wider}
    assert {path for path, scale in found.items() if scale.target == 2048} == expected
    assert {scale.target for scale in found.values()} == {448, 2048}
    others = {
        policy.recipe(path).dgrad.dy.tensor_scale.target for path in paths(layers)
    }
    assert others == {448}


def test_ue5m3_passes_over_blocks_without_an_mlp():
    hybrid = types.SimpleNamespace(
        num_layers=3, layer_paths=["blocks/0/mlp/down", "blocks/2/mamba/output"]
    )
    assert [rule.pattern for rule in policies.ue5m3(hybrid).rules] == [
        "blocks/0/mlp/down"
    ]


def test_ti2d_has_queries_and_keys_in_mxfp8():
    sites = ("query", "key", "value", "out")
    attention = [f"blocks/1/attention/{site}" for site in sites]
    config = types.SimpleNamespace(num_layers=2, layer_paths=attention)
    policy = policies.ti2d(config)
    found = [policy.recipe(path) for path in attention]
    assert found == [recipes.mxfp8()] * 2 + [recipes.ti2d()] * 2
    assert policies.ti2d(model(2)).rules == ()  # which has no attention


@pytest.mark.parametrize(
    ("step", "policy"), [(0, FP4), (4, FP4), (5, FINISH), (99, FINISH)]
)
def test_a_schedule_changes_at_its_step(step, policy):
    assert SCHEDULE.at(step) == policy


@pytest.mark.parametrize(
    ("steps", "spans"),
    [(6, [(FP4, 5), (FINISH, 6)]), (8, [(FP4, 5), (FINISH, 8)])],
)
def test_spans_end_with_the_run(steps, spans):
    assert list(SCHEDULE.spans(steps)) == spans


@pytest.mark.parametrize("steps", [3, 5])
def test_a_phase_that_a_run_does_not_reach_raises(steps):
    with pytest.raises(ValueError, match=f"got steps={steps} with a start at 5"):
        SCHEDULE.spans(steps)


def test_a_negative_step_has_no_policy():
    with pytest.raises(ValueError, match="must not be negative, got step=-1"):
        SCHEDULE.at(-1)


def test_a_policy_is_a_schedule_that_never_changes():
    assert list(Schedule.of(FP4).spans(7)) == [(FP4, 7)]
    assert Schedule.of(SCHEDULE) is SCHEDULE


def test_a_schedule_survives_json():
    data = json.loads(json.dumps(recipes.to_json(SCHEDULE)))
    assert recipes.from_json(data) == SCHEDULE


def test_a_schedule_checks_every_policy():
    typo = Policy(UFP4, (Rule("*/dwon", BF16),))
    with pytest.raises(ValueError, match=r"pattern='\*/dwon'"):
        Schedule(((0, FP4), (5, typo))).check(path for path in paths(2))


@pytest.mark.parametrize(
    ("phases", "error", "message"),
    [
        ((), ValueError, r"start at step 0, .*, got \[\]"),
        (((1, FP4),), ValueError, r"start at step 0, .*, got \[1\]"),
        (((0, FP4), (0, FINISH)), ValueError, r"growing steps, got \[0, 0\]"),
        (((0, FP4), (7, FP4), (5, FP4)), ValueError, r"got \[0, 7, 5\]"),
        ([(0, FP4)], TypeError, "phases must be a tuple"),
        ((0, FP4), TypeError, r"phases\[0\] must be a tuple, got 0"),
        (((0.0, FP4),), TypeError, r"phases\[0\] must be an integer step and"),
        (((0, UFP4),), TypeError, r"phases\[0\]\[1\] must be a Policy"),
    ],
)
def test_bad_phases_raise(phases, error, message):
    with pytest.raises(error, match=message):
        Schedule(phases)
