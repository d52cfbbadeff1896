"""NNX models their authors wrote, trained in FP4 after one injected line."""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.user_models.train_nnx import MODELS, build, losses
from fp4jax import recipes

RECIPES = {"ufp4": recipes.ufp4(), "ue5m3": recipes.ue5m3(every=2)}
train = functools.partial(losses, steps=4)


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    return request.param, train(request.param, None, "none")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_one_line_trains_in_fp4(reference, recipe):
    name, plain = reference
    found = train(name, recipe, "quantize_model")
    assert found == train(name, recipe, "dot_general")
    assert all(map(math.isfinite, found))
    assert all(a != b for a, b in zip(found, plain, strict=True))
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", MODELS)
def test_injection_changes_no_parameter(name):
    models = build(name, None, "none"), build(name, RECIPES["ufp4"], "quantize_model")
    params = [jax.tree.leaves(nnx.state(model, nnx.Param)) for model in models]
    for a, b in zip(*params, strict=True):
        np.testing.assert_array_equal(a, b)
