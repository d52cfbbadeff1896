"""The table of a plan: whether it fits, and a meaning for every row."""

import pytest

from experiments.bill import GIB, bill, fit
from experiments.collectives import Collective
from experiments.devices import DEVICES
from experiments.estimate import Estimate
from experiments.footprint import Footprint

H100 = DEVICES["H100"]  # 80 GiB
SECONDS = {
    "gemms": 0.02,
    "attention": 0.004,
    "quantizers": 0.003,
    "between": 0.002,
    "optimizer": 0.001,
}


def make_footprint(residuals, peak, collectives=()):
    return Footprint(GIB, 2 * GIB, residuals * GIB, peak * GIB, collectives)


def rows(footprint, communication):
    table = bill(
        footprint,
        Estimate(**SECONDS, communication=communication),
        kind=H100,
        devices=8,
        tokens=3000,
        flops=1e14,
    )
    what, how_much, meaning = (list(column.cells) for column in table.columns)
    assert all(meaning) and len(set(what)) == len(what)
    return dict(zip(what, how_much, strict=True))


@pytest.mark.parametrize(
    ("residuals", "peak", "expected"),
    [
        (10, 60, "yes"),
        (10, 80, "yes"),
        (70, 100, "perhaps"),
        (76, 81, "perhaps"),
        (77, 90, "no"),
    ],
)
def test_says_whether_a_step_fits(residuals, peak, expected):
    footprint = make_footprint(residuals, peak)  # at least 4 GiB more than residuals
    what, found, meaning = fit(footprint, H100)
    assert (what, found) == ("fits in 80 GiB", expected)
    assert ("--microbatches" in meaning) == (expected != "yes")
    assert ("MEM_FRACTION" in meaning) == (60 < peak <= 80)


def test_a_step_without_communication_has_one_time():
    found = rows(make_footprint(1, 9), communication=0)
    assert found["time of a step"] == "30.00 ms"
    assert found["tokens/s"] == "100,000"
    assert " to " not in found["utilization"]


def test_a_step_with_communication_lies_between_two():
    sent = Collective("all-gather", (("u8", (GIB,)),), devices=(0, 1), times=3)
    found = rows(make_footprint(1, 9, (sent,)), communication=0.02)
    assert found["time of a step"] == "30.00 to 50.00 ms"
    assert found["tokens/s"] == "60,000 to 100,000"
    assert found["all-gather"] == "3.000 GiB"
    parts = [found[name] for name in found if name.startswith("time of")][:-1]
    assert sum(float(part.removesuffix(" ms")) for part in parts) == 50
