"""Parameters and FLOPs of the presets, none of them allocated."""

import dataclasses
import functools

import pytest

from fp4jax import models
from fp4jax.models import PRESETS, flops_per_token

PARAMETERS = {
    "tiny": 853_120,
    "dense_10m": 9_965_824,
    "dense_35m": 35_662_336,
    "dense_125m": 125_455_104,
    "dense_350m": 349_234_176,
    "dense_1p5b": 1_501_677_568,
}
num_params = functools.cache(models.num_params)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    assert num_params(PRESETS[name]) == PARAMETERS[name]


def test_the_largest_preset_is_of_its_name():
    assert PARAMETERS["dense_1p5b"] == pytest.approx(1.5e9, rel=0.02)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", PRESETS)
def test_flops_count_every_weight_that_multiplies(name, tied):
    config = dataclasses.replace(PRESETS[name], tie_embeddings=tied)
    norms = (2 * config.num_layers + 1) * config.d_model
    lookups = 0 if tied else config.vocab_size * config.d_model
    weights = num_params(config) - norms - lookups
    attention = config.num_layers * 256 * config.num_heads * config.head_dim
    expected = 6 * weights + 6 * attention
    assert flops_per_token(config, sequence_length=256) == expected
