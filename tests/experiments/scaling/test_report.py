from experiments.many_runs.found import Found
from experiments.scaling import report
from tests.experiments.many_runs.cases import about, made_up, row


def test_gaps_over_compute_are_to_bf16_of_the_same_model_and_seed():
    runs = [run for run in about("scaling").queue(Found([]), 2e-3) if run.lr == 2e-3]
    found = report.gaps([made_up(run) for run in runs])
    assert set(found) == {"e2m1_ref", "ufp4"}
    assert all(abs(point.value - 1) < 0.5 for point in found["ufp4"])


def test_the_pair_is_ranked_over_all_sizes_and_seeds():
    runs = [run for run in about("scaling").queue(Found([]), 2e-3) if run.lr == 2e-3]
    pairs = [run for run in runs if run.model in ("dense_3m", "dense_9m")]
    behind = {"bf16": 0.0, "e2m1_ref": 0.04, "ufp4": 0.02}
    # The last seed of each model is the other way round: -1, -1 and 1 points.
    rows = [
        row(run, 2.0 + behind[run.policy] * (-1 if run.seed == 2 else 1), flops=1.0)
        for run in pairs
    ]
    page = report._ranked(rows)
    assert page.startswith("In 4 of 6 pairs of one size and seed `ufp4` is ahead")
    assert page.endswith("-0.33 (-1.42 to +0.75), within seeds.")
    assert report._ranked([r for r in rows if r["policy"] != "ufp4"]).startswith(
        "There are no two pairs"
    )
