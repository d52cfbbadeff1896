import dataclasses

import jax
import pytest
from flax import nnx

from fp4jax import policies
from fp4jax.models import PRESETS, ModelConfig, Transformer, flops_per_token, num_params

TINY = PRESETS["tiny"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be positive, got num_layers=0"),
        ({"norm_eps": float("nan")}, "norm_eps must be positive, got norm_eps=nan"),
        ({"num_heads": 3, "num_kv_heads": 2}, "got num_heads=3, num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim must be even, .* got head_dim=7"),
        ({"remat": "some"}, "one of none, dots, full, got remat='some'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^ModelConfig: .*{message}"):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 853_120),
        ("dense_10m", 9_965_824),
        ("dense_35m", 35_662_336),
        ("dense_125m", 125_455_104),
        ("dense_350m", 349_234_176),
        ("dense_1p5b", 1_501_677_568),
    ],
)
def test_parameter_counts(name, count):
    assert num_params(PRESETS[name]) == count


def test_every_preset_is_counted_and_the_largest_is_of_its_name():
    assert len(PRESETS) == 6
    assert num_params(PRESETS["dense_1p5b"]) == pytest.approx(1.5e9, rel=0.02)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", PRESETS)
def test_flops_count_every_weight_that_multiplies(name, tied):
    config = dataclasses.replace(PRESETS[name], tie_embeddings=tied)
    model = nnx.eval_shape(
        lambda: Transformer(config, policies.bf16(config), rngs=nnx.Rngs(0))
    )
    sizes = {
        jax.tree_util.keystr(path): leaf.size
        for path, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    }
    kernels = sum(n for path, n in sizes.items() if "kernel" in path)
    if tied:
        kernels += config.d_model * config.vocab_size
    attention = config.num_layers * 256 * config.num_heads * config.head_dim
    expected = 6 * kernels + 6 * attention
    assert flops_per_token(config, sequence_length=256) == expected


def test_config_is_a_value():
    config = ModelConfig(**dataclasses.asdict(TINY))
    assert config == TINY
    assert hash(config) == hash(TINY)
