"""Parameters and FLOPs of the presets, none of them allocated."""

import dataclasses

import pytest

from fp4jax.models import PRESETS, flops_per_token, num_active_params, num_params

PARAMETERS = {
    "tiny": 853_120,
    "dense_10m": 9_965_824,
    "dense_35m": 35_662_336,
    "dense_125m": 125_455_104,
    "dense_350m": 349_234_176,
    "dense_1p5b": 1_501_677_568,
    "olmo_tiny": 917_504,
    "olmo_38m": 37_748_736,
    "olmo_300m": 301_989_888,
    "olmo_1b": 1_176_764_416,
    "olmo_7b": 6_888_095_744,
    "nemotron_h_tiny": 726_424,
    "nemotron_h_30m": 31_410_672,
    "nemotron_h_300m": 293_183_616,
    "nemotron_h_8b": 8_100_852_736,
    "qwen3_tiny": 1_513_088,
    "qwen3_47m": 47_291_776,
    "qwen3_300m": 300_734_208,
    "qwen3_700m": 703_361_024,
    "qwen3_30b_a3b": 30_532_122_624,
    "moe_tiny": 1_475_200,
    "moe_45m": 44_772_736,
    "moe_290m": 285_962_496,
    "moe_7p9b": 7_820_622_336,
    "moe_124b": 122_525_382_144,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    assert num_params(PRESETS[name]) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [
        ("olmo_1b", 1_176.8e6, 1e-4),
        ("olmo_7b", 6_888.1e6, 1e-5),
        ("nemotron_h_8b", 8.10e9, 1e-3),
        ("qwen3_30b_a3b", 30.53e9, 1e-4),
        ("dense_1p5b", 1.5e9, 0.02),  # the shapes of these are not published
        ("moe_7p9b", 7.9e9, 0.02),
        ("moe_124b", 124e9, 0.02),
    ],
)
def test_presets_have_the_published_sizes(name, published, within):
    assert num_params(PRESETS[name]) == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("qwen3_30b_a3b", 3_353_032_704),  # 3.35B as published
        ("moe_7p9b", 1_403_337_216),
        ("moe_124b", 7_064_581_632),
    ],
)
def test_active_parameters(name, active):
    assert num_active_params(PRESETS[name]) == active


def test_nemotron_h_has_the_published_blocks_and_projections():
    config = PRESETS["nemotron_h_8b"]
    counts = {kind: config.kinds.count(kind) for kind in "M-*"}
    assert counts == {"M": 24, "-": 24, "*": 4}
    assert len(config.layer_paths) == 112
    downs = [path for path in config.layer_paths if path.endswith("mlp/down")]
    wider = [int(path.split("/")[1]) for path in downs[-4:]]
    assert wider == [45, 47, 49, 51]  # as in arXiv 2609.02846


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["tiny", "dense_350m", "olmo_38m"])
def test_flops_count_every_weight_that_multiplies(name, tied):
    config = dataclasses.replace(PRESETS[name], tie_embeddings=tied)
    norms = (2 * config.num_layers + 1) * config.d_model
    lookups = 0 if tied else config.vocab_size * config.d_model
    weights = num_params(config) - lookups - (norms if config.norm == "rms" else 0)
    attention = config.num_layers * 256 * config.num_heads * config.head_dim
    expected = 6 * weights + 6 * attention
    assert flops_per_token(config, sequence_length=256) == expected


def test_flops_of_a_hybrid():
    config = PRESETS["nemotron_h_8b"]
    mamba = 4096 * (8192 + 10_240 + 128) + 8192 * 4096
    attention = 4096 * (4096 + 2 * 1024 + 4096)
    weights = 24 * (mamba + 2 * 4096 * 21_504) + 4 * attention + 131_072 * 4096
    mixing = 4 * 6 * 2048 * 4096 + 24 * 12 * 8192 * 128
    assert flops_per_token(config, sequence_length=2048) == 6 * weights + mixing


def test_flops_of_a_mixture_count_the_chosen_experts():
    config = PRESETS["qwen3_30b_a3b"]
    attention = 2048 * (4096 + 2 * 512 + 4096)
    experts = 2048 * 128 + 8 * 3 * 2048 * 768  # the router first
    weights = 48 * (attention + experts) + 151_936 * 2048
    mixing = 48 * 6 * 4096 * 4096
    assert flops_per_token(config, sequence_length=4096) == 6 * weights + mixing


def test_every_parameter_of_a_model_without_experts_is_active():
    config = PRESETS["nemotron_h_tiny"]
    assert num_active_params(config) == num_params(config)
