"""What must hold on every mesh, and what says that it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.in_turn import ProcessDied
from experiments.scaling_gpus import invariance
from fp4jax import sharding

ONE = [5.0, 4.0, 3.0]


@pytest.mark.parametrize(("last", "holds"), [(3.05, True), (3.4, False)])
def test_losses_may_differ_three_times_as_far_as_another_order(last, holds):
    found = invariance.judged(ONE, [[5.0, 4.0, 3.1]], [5.0, 4.1, last])
    assert found["holds"] == holds
    assert found["of_orders"] == [pytest.approx(0.1 / 3)]
    assert found["last_distance"] == pytest.approx(last - 3)


def test_the_farthest_of_several_orders_is_the_bound():
    near, far, mesh = [5.0, 4.0, 3.1], [5.0, 4.0, 2.8], [5.0, 4.0, 3.5]
    assert not invariance.judged(ONE, [near], mesh)["holds"]
    assert invariance.judged(ONE, [near, far, near], mesh)["holds"]


def test_a_run_that_died_does_not_hold():
    found = invariance.judged(ONE, [ONE, ProcessDied("status 3")], ONE)
    assert found == {"error": "status 3", "holds": False}
    rows = [{"what": "losses", "mesh": "fsdp=2", **found}]
    assert invariance.table(rows).row_count == 1


def test_a_policy_that_fails_is_a_row_and_the_next_has_its_turn(monkeypatch):
    def losses(run):
        if run.policy == "ufp4":
            raise NotImplementedError("no such kernel")
        return lambda: ONE

    monkeypatch.setattr(invariance, "losses", losses)
    arguments = invariance.Arguments(model="tiny", policies=("ufp4", "bf16"), jobs=1)
    failed, row = invariance.compare_losses(arguments, ["fsdp=2"])
    assert failed["error"] == "NotImplementedError: no such kernel"
    assert not failed["holds"] and row["holds"]


def test_codes_that_draw_are_those_of_one_device():
    x = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    found, expected = (invariance.codes("ufp4 dy", x, m) for m in (mesh, None))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(found) == 2 and found[0].dtype == np.uint8


@pytest.mark.parametrize(
    ("fails", "holds"),
    [
        (lambda mesh: mesh is not None and mesh.shape["fsdp"] > 1, [False, True]),
        (lambda mesh: mesh is None, [False, False]),
    ],
)
def test_codes_of_a_mesh_that_fails_are_a_row(monkeypatch, fails, holds):
    def codes(name, x, mesh):
        if fails(mesh):
            raise NotImplementedError("no such kernel\nat all")
        return [np.zeros(2)]

    monkeypatch.setattr(invariance, "codes", codes)
    arguments = invariance.Arguments(size=32)
    rows = list(invariance.compare_codes(arguments, ["fsdp=2", "tensor=2"]))
    assert len(rows) == 2 * len(invariance.QUANTIZERS)
    assert rows[0]["error"] == "NotImplementedError: no such kernel"
    assert [row["holds"] for row in rows[:2]] == holds
    assert invariance.table(rows).row_count == len(rows)


def test_losses_are_of_the_policy_and_the_mesh():
    arguments = invariance.Arguments(
        model="tiny", policies=("bf16",), rows=8, sequence=32, jobs=1
    )
    (row,) = invariance.compare_losses(arguments, ["fsdp=2"])
    assert row["holds"] and 0 < row["distance"] < 0.01
    assert len(row["losses"]) == invariance.STEPS
