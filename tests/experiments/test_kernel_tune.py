"""Which block sizes are taken for the fastest, of times that are made up."""

import math

import pytest

from experiments.kernels import tune
from fp4jax.kernels import devices
from fp4jax.kernels.tile import Tile


def test_the_fastest_serves_up_to_the_size_it_was_measured_at(monkeypatch):
    times = {(4, 1): 3, (4, 2): 2, (4, 4): math.inf, (64, 1): 9, (64, 2): 9, (64, 4): 1}
    monkeypatch.setitem(tune.SHAPES, "rows", ((2, 2), (8, 8)))
    found = tune.tuned(["rows"], lambda _, shape, n: times[math.prod(shape), n])
    assert found == {"rows": ((4, 2), (math.inf, 4))}


def test_sizes_with_one_winner_are_one_entry():
    found = tune.tuned(["product"], lambda *args: abs(args[2].n - 128) + args[2].peers)
    assert found == {"product": ((math.inf, Tile(128, 64, 3, peers=1)),)}


def test_what_is_printed_is_python_for_the_table():
    sizes = {"rows": ((4, 2), (math.inf, 4)), "product": ((math.inf, Tile(n=128)),)}
    printed = tune.literal("NVIDIA H200", sizes)
    names = {"math": math, "Tile": Tile}
    assert eval("{" + printed + "}", names) == {"NVIDIA H200": sizes}


def test_where_no_candidate_can_do_a_shape_there_is_no_table():
    with pytest.raises(ValueError, match="columns: no candidate can do shape="):
        tune.tuned(["columns"], lambda *_: math.inf)


@pytest.mark.skipif(not devices.without_mosaic(), reason="it runs here")
def test_a_device_without_kernels_is_said(capsys):
    assert tune.main() == 1
    assert "error: " in capsys.readouterr().err
