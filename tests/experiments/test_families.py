"""Every policy trains a model of some family, and what the study says of its runs."""

import itertools
import math

import pytest

from experiments.families.run import MODELS, is_good, judged, table, trained
from fp4jax import policies

PLAIN = {"model": "tiny", "policy": "bf16", "losses": [6.0 - i / 10 for i in range(10)]}


@pytest.mark.parametrize(
    ("policy", "model"), list(zip(policies.PRESETS, itertools.cycle(MODELS)))
)
def test_every_policy_trains_a_model_of_some_family(policy, model):
    losses = trained(model, policy, 2)["losses"]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("losses", "good"),
    [
        ([6.0, *(loss + 0.01 for loss in PLAIN["losses"][1:])], True),
        ([*PLAIN["losses"][:9], 5.0], False),
        ([6.0 + i for i in range(10)], False),
        ([math.nan] * 10, False),
    ],
    ids=["quantized", "as the reference", "rising", "not finite"],
)
def test_a_run_must_learn_and_differ(losses, good):
    quantized = {"model": "tiny", "policy": "ufp4", "losses": losses}
    reference, judgement = judged([PLAIN, quantized])
    assert is_good(reference)
    assert is_good(judgement) == good
    assert ("(!)" in table([reference, judgement])) == (not good)
