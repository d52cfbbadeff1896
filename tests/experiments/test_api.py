"""What pages of the library are made of."""

import importlib
import inspect

import pytest

from experiments import api
from fp4jax import policies
from fp4jax.kernels import exchange


@pytest.mark.parametrize("name", api.PACKAGES)
def test_everything_public_says_what_it_is(name):
    module = importlib.import_module(name)
    names = api.public(module)
    assert names
    for each in (getattr(module, n) for n in names):
        if inspect.isclass(each) or inspect.isfunction(each):
            assert each.__module__.startswith("fp4jax") and inspect.getdoc(each)


def test_a_module_offers_what_it_defines_and_names_again():
    names = api.public(policies)
    assert {"Policy", "PRESETS", "ufp4"} <= set(names)
    assert {"DENSE", "RAGGED"} <= set(api.public(exchange))
    assert not {"Fprop", "Recipe", "dataclasses"} & set(names)
