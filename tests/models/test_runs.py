"""Which blocks of a sequence are found to repeat."""

import itertools

import pytest

from fp4jax.models.runs import Run, find_runs

NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ("A", [Run(0, 1, 1)]),
        ("AAAA", [Run(0, 1, 4)]),
        ("AAAB", [Run(0, 1, 3), Run(3, 1, 1)]),
        ("ABABAB", [Run(0, 2, 3)]),
        ("AAABAB", [Run(0, 1, 2), Run(2, 2, 2)]),
        ("AABAAB", [Run(0, 3, 2)]),
        ("ABABAC", [Run(0, 2, 2), Run(4, 1, 1), Run(5, 1, 1)]),
    ],
)
def test_runs_of(blocks, runs):
    assert list(find_runs(blocks)) == runs


def test_runs_cover_every_block_once():
    for blocks in map("".join, itertools.product("AB", repeat=7)):
        places = [place for run in find_runs(blocks) for place in run.places]
        assert sorted(itertools.chain(*places)) == list(range(7))
        for place in places:
            assert len({blocks[i] for i in place}) == 1


def test_a_hybrid_of_52_blocks_compiles_few():
    assert sum(run.period for run in find_runs(NEMOTRON_H)) <= 18
