from experiments.many_runs.found import Found
from experiments.scaling import report
from tests.experiments.many_runs.cases import about, made_up


def test_gaps_over_compute_are_to_bf16_of_the_same_model_and_seed():
    runs = [run for run in about("scaling").queue(Found([]), 2e-3) if run.lr == 2e-3]
    found = report.gaps([made_up(run) for run in runs])
    assert set(found) == {"e2m1_ref", "ufp4"}
    assert all(abs(point.value - 1) < 0.5 for point in found["ufp4"])
