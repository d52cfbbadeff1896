"""Model shapes as values: their errors, their blocks, their text."""

import dataclasses
import math

import pytest

from fp4jax.models import PRESETS, MambaConfig, ModelConfig, MoEConfig

TINY = PRESETS["tiny"]
MOE = MoEConfig(num_experts=8, top_k=2, d_expert=16)
MAMBA = MambaConfig(num_heads=4, head_dim=16, d_state=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, .* num_layers=0"),
        ({"num_layers": True}, "must be a positive integer, got num_layers=True"),
        ({"d_model": 128.0}, "d_model must be a positive integer, got d_model=128.0"),
        ({"norm_eps": math.nan}, "norm_eps must be positive and finite, .*=nan"),
        ({"rope_theta": math.inf}, "rope_theta must be zero, or positive .*=inf"),
        ({"rope_theta": True}, "rope_theta must be zero, or positive .*=True"),
        ({"num_heads": 3, "num_kv_heads": 2}, "got num_heads=3, num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim must be even, .* got head_dim=7"),
        ({"remat": "some"}, "one of none, dots, full, got remat='some'"),
        ({"mlp": "gelu"}, "mlp must be one of swiglu, relu2, got mlp='gelu'"),
        ({"norm": "none"}, "norm must be one of rms, layer, got norm='none'"),
        ({"blocks": ""}, "blocks must be letters out of TEM.*got blocks=''"),
        ({"blocks": "TX"}, "blocks must be letters out of TEM.*got blocks='TX'"),
        ({"blocks": "TTT"}, "divides num_layers, got blocks='TTT', num_layers=4"),
        ({"blocks": "E"}, "moe must be given if .* moe=None, blocks='E'"),
        ({"mamba": MAMBA}, "mamba must be given if and only if a block is 'M', got"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^ModelConfig: .*{message}"):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (MOE, {"top_k": 0}, "top_k must be a positive integer, got top_k=0"),
        (MOE, {"top_k": 9}, "at most num_experts, got top_k=9, num_experts=8"),
        (MOE, {"d_shared": -1}, "d_shared must be an integer that is not negative"),
        (MOE, {"score": "max"}, "score must be one of softmax, sigmoid, got .*'max'"),
        (MOE, {"scaling": 0.0}, "scaling must be positive and finite, got .*=0.0"),
        (MOE, {"capacity_factor": 0.5}, "factor must be 0 or at least 1, got .*=0.5"),
        (MOE, {"bias_rate": -1.0}, "bias_rate must be zero, or positive and finite"),
        (MAMBA, {"chunk": 0}, "chunk must be a positive integer, got chunk=0"),
        (MAMBA, {"num_groups": 3}, "got num_heads=4, num_groups=3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_values_of_parts_are_named(kind, changes, message):
    with pytest.raises(ValueError, match=f"^{type(kind).__name__}: .*{message}"):
        dataclasses.replace(kind, **changes)


def test_a_pattern_repeats():
    config = dataclasses.replace(TINY, blocks="*-", mlp="relu2")
    assert config.kinds == "*-*-"
    assert config.layer_paths[3:7] == (
        "blocks/0/attention/out",
        "blocks/1/mlp/up",
        "blocks/1/mlp/down",
        "blocks/2/attention/query",
    )


def test_layers_of_every_kind_of_block():
    moe = dataclasses.replace(MOE, d_shared=8)
    config = dataclasses.replace(TINY, blocks="EM", moe=moe, mamba=MAMBA)
    experts = ("gate", "up", "down", "shared/gate", "shared/up", "shared/down")
    assert config.layers("E")[4:] == tuple(f"moe/{name}" for name in experts)
    assert config.layers("M") == ("mamba/input", "mamba/output")


def test_a_text_without_the_fields_of_other_families_is_that_of_a_dense_model():
    names = "vocab_size num_layers d_model num_heads num_kv_heads head_dim d_ff"
    fields = dataclasses.asdict(TINY)
    assert ModelConfig.of({name: fields[name] for name in names.split()}) == TINY


def test_config_is_a_value():
    hybrid = dataclasses.replace(TINY, blocks="EM", moe=MOE, mamba=MAMBA)
    for config in (TINY, hybrid):
        again = ModelConfig.of(dataclasses.asdict(config))
        assert again == config
        assert hash(again) == hash(config)
