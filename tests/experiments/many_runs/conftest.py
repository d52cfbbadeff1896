"""What several tests of many runs train on."""

import pytest

from fp4jax import data


@pytest.fixture(scope="session")
def corpus(bytes_of_two):
    return data.load_corpus(bytes_of_two)
