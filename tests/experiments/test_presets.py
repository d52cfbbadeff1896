"""The command line's words reach their fields, or one sentence says why not."""

import dataclasses

import pytest

from experiments import presets
from fp4jax import models, policies
from fp4jax.models import MoEConfig


@pytest.mark.parametrize("model", models.PRESETS)
def test_every_model_resolves_with_the_vocabulary_of_its_data(model):
    config = presets.resolve(model)
    assert config.model == models.PRESETS[model]
    assert config.data.vocab_size == config.model.vocab_size


def test_reference_comes_first_and_control_last_whether_named_or_not():
    names = lambda *given: presets.resolve(policy_names=given).policies
    assert names() == ("bf16", "int2")
    assert names("ufp4", "int2", "nvfp4", "ufp4") == ("bf16", "ufp4", "nvfp4", "int2")
    assert set(names(*policies.PRESETS)) == set(policies.PRESETS)


def test_flags_reach_their_fields():
    config = presets.resolve(data="some/folder", steps=7, seeds=2)
    assert config.data.source == "some/folder"
    assert (config.run.steps, config.run.seeds) == (7, 2)


def test_assignments_have_the_type_of_their_field():
    given = [
        "optim.lr=3e-4",
        "model.tie_embeddings=false",
        "data.tokenizer=bytes",
        "run.seed=1",
        "run.seed=2",
    ]
    config = presets.resolve(assignments=given)
    assert config.optim.lr == 3e-4
    assert config.model.tie_embeddings is False
    assert config.data.tokenizer == "bytes"
    assert config.run.seed == 2


def test_fields_of_a_section_change_together():
    given = ["model.num_heads=9", "model.num_kv_heads=3"]
    assert presets.resolve(assignments=given).model.num_kv_heads == 3


def test_the_model_follows_the_vocabulary_of_the_data():
    config = presets.resolve(assignments=["data.vocab_size=300"])
    assert config.model.vocab_size == 300


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ("optim.lr", ValueError, "must read path=value, got 'optim.lr'"),
        ("optim=1", ValueError, "must be one of optim.lr, optim.*got 'optim'"),
        ("optim.rate=1", ValueError, "one of optim.lr, optim.*got 'optim.rate'"),
        ("optin.lr=1", ValueError, "one of model.*optim.lr.*run.*got 'optin.lr'"),
        ("policies=ufp4", ValueError, "one of model.*data.*got 'policies'"),
        ("optim.lr.x=1", ValueError, "one of optim.lr, .*got 'optim.lr.x'"),
        ("optim.lr=fast", TypeError, "optim.lr: must be of type float, got 'fast'"),
        ("run.steps=3.5", TypeError, "run.steps: must be of type int, got '3.5'"),
        ("data.site_packages=1", TypeError, "must be true or false, got '1'"),
        ("model.vocab_size=9", ValueError, "follows data.vocab_size; set that"),
        ("optim.lr=-1", ValueError, "OptimConfig: lr must be positive, got lr=-1"),
        ("model.head_dim=3", ValueError, "ModelConfig: head_dim must be even"),
        ("data.batch_size=0", ValueError, "DataConfig: batch_size must be at least 1"),
        ("run.average=0", ValueError, "RunConfig: average must be at least 1"),
        ("run.microbatches=0", ValueError, "RunConfig: microbatches must be at least"),
        ("run.microbatches=7", ValueError, "batch_size must be a multiple of run.mic"),
    ],
)
def test_a_bad_assignment_is_one_sentence(assignment, error, message):
    with pytest.raises(error, match=message) as caught:
        presets.resolve(assignments=[assignment])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "huge"}, "--model: must be one of tiny, .*got 'huge'"),
        ({"policy_names": ["fp8"]}, "--policies: must be one of bf16, .*got 'fp8'"),
        ({"steps": 0}, "steps must be at least 1, got steps=0"),
        ({"seeds": 0}, "seeds must be at least 1, got seeds=0"),
    ],
)
def test_a_bad_flag_lists_what_is_allowed(given, message):
    with pytest.raises(ValueError, match=message):
        presets.resolve(**given)


def test_every_setting_can_be_assigned_its_own_value():
    config = presets.resolve()
    for path, value in presets.settings(config).items():
        assert presets.assign(config, [f"{path}={value}"]) == config


def test_a_batch_and_its_parts_change_together():
    assignments = ["run.microbatches=7", "data.batch_size=21"]
    assert presets.resolve(assignments=assignments).run.microbatches == 7


def test_seeds_that_pass_the_largest_raise():
    assignments = ["data.seed=4294967295"]
    presets.resolve(assignments=assignments)
    with pytest.raises(ValueError, match=r"must be at most 2\*\*32, got 4294967297"):
        presets.resolve(seeds=2, assignments=assignments)


def test_parts_of_a_model_are_set_by_paths_of_three():
    moe = MoEConfig(num_experts=8, top_k=2, d_expert=16)
    shape = dataclasses.replace(presets.resolve().model, blocks="E", moe=moe)
    config = dataclasses.replace(presets.resolve(), model=shape)
    given = ["model.moe.top_k=9", "model.moe.num_experts=16", "model.d_ff=8"]
    found = presets.assign(config, given).model
    assert (found.moe.top_k, found.moe.num_experts, found.d_ff) == (9, 16, 8)
    with pytest.raises(ValueError, match="model.moe.top_k, .*got 'model.moe.top'"):
        presets.assign(config, ["model.moe.top=1"])
    with pytest.raises(ValueError, match="got 'model.moe.top_k'"):
        presets.assign(presets.resolve(), ["model.moe.top_k=1"])
