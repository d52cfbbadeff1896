"""The studies of `experiments.many_runs`: their queues, and pages of made-up rows."""

import importlib
import math

import numpy as np
import pytest
from scipy import stats

from experiments import study
from experiments.ablation import noise
from experiments.ablation import study as ablation
from experiments.many_runs import budget, command, tuning
from experiments.many_runs.found import STUDIES, Found
from experiments.many_runs.gaps import Deviation
from experiments.many_runs.shapes import SHAPES
from experiments.many_runs.variants import POLICIES
from experiments.scaling import fit, report
from experiments.scaling.fit import Law, Point
from fp4jax import models
from fp4jax.numerics import E2M1_TO_2, NEAREST

studies = pytest.mark.parametrize("name", STUDIES)


def about(name):
    return importlib.import_module(f"experiments.{name}.study").STUDY


def made_up(run):
    """Returns a row whose loss falls with compute, higher under 4 bits."""
    shape = SHAPES[run.model]
    flops = run.tokens * models.flops_per_token(shape, sequence_length=run.length)
    rng = np.random.default_rng([run.seed, run.noise, len(run.policy)])
    loss = 2 + (flops / fit.UNIT) ** -0.2 + abs(math.log(run.lr / 2e-3)) / 10
    loss *= 1 if run.policy == "bf16" else 1.01
    loss += rng.normal(0, 1e-3)
    each = {"loss": loss, "bits_per_byte": loss}
    return run.piece | {
        "heldout": {"bf16": {"all": each, "code": each}},
        "flops": flops,
        "params": models.num_params(shape),
        "losses": [loss] * 10,
        "seconds": 30.0,
        "tokens_per_s": 1e6,
        "lanes": 0,
        "diverged": False,
    }


@studies
def test_the_queue_grows_to_the_plan_as_rates_are_found(name):
    queue, rows = about(name).queue, []
    for _ in range(3):
        found = Found(rows)
        rows += [made_up(run) for run in queue(found, None) if not found.row(run)]
    runs = queue(Found(rows), None)
    assert all(Found(rows).row(run) for run in runs)
    assert set(runs) == set(queue(Found([]), 2e-3))  # the best one of made-up rows
    assert len(set(runs)) == len(runs)


@studies
def test_a_tiny_study_trains_and_shows(name, bytes_of_two, tmp_path, monkeypatch):
    # A mixture of bytes: what `--data` alone decides is BPE.
    monkeypatch.setattr(command, "DataConfig", lambda source: bytes_of_two)
    flags = ["--tiny", "--out", str(tmp_path), "--data", bytes_of_two.source]
    assert command.main(about(name), flags) == 0
    rows = study.Results(tmp_path / "results.jsonl").rows
    assert [row["policy"] for row in rows] == [run.policy for run in about(name).tiny]
    assert set(rows[1]["heldout"]) == {"bf16", "own"}


@studies
def test_pages_are_made_of_rows_or_say_that_there_are_none(name, tmp_path):
    found = about(name)
    page = (found.folder / "README.md").read_text()
    nothing = found.parts(Found([]), tmp_path)
    study.filled(page, nothing)
    assert any("Not run yet" in part for part in nothing.values())
    rows = [made_up(run) for run in found.queue(Found([]), 2e-3)]
    everything = found.parts(Found(rows), tmp_path)
    assert "Not run yet" not in study.filled(page, everything)
    assert set(everything) == set(nothing)


@studies
def test_pages_stay_where_runs_diverge(name, tmp_path):
    """At the highest rate, and one seed of ufp4, whose losses logs write as null."""
    found = about(name)
    rows = [made_up(run) for run in found.queue(Found([]), 2e-3)]
    for row in rows:
        is_seed = row["policy"] == "ufp4" and row["seed"] == 1
        if row["lr"] == tuning.RATES[-1] or is_seed:
            nothing = {"loss": None, "bits_per_byte": None}
            row |= {"heldout": {"bf16": {"all": nothing, "code": nothing}}}
            row |= {"diverged": True, "losses": [2.0, None], "flops": 1.0}
    queue = found.queue(Found(rows), None)
    assert all(Found(rows).row(run) for run in queue)  # rates were found
    page = "".join(found.parts(Found(rows), tmp_path).values())
    assert "diverged" in page and "nan" not in page


def test_what_the_committed_rows_say_is_what_the_pages_show(tmp_path):
    for name in STUDIES:
        found = about(name)
        page = (found.folder / "README.md").read_text()
        parts = found.parts(Found.of(found.folder / "results.jsonl"), tmp_path)
        assert study.filled(page, parts) == page


def test_variants_change_what_their_names_say():
    recipe = lambda name: POLICIES[name](SHAPES["dense_2m"]).default
    rotated = lambda name: [
        gemm
        for gemm in ("fprop", "dgrad", "wgrad")
        if all(q.rotation for q in vars(getattr(recipe(name), gemm)).values())
    ]
    assert rotated("ufp4_no_rht") == []
    assert rotated("ufp4_rht_fprop_wgrad") == ["fprop", "wgrad"]
    assert rotated("ue5m3_rht") == ["wgrad"]
    assert recipe("e2m1_to_2_rht").fprop.x.grid == E2M1_TO_2
    drawn = recipe("ufp4_sr_dgrad")
    assert drawn.dgrad.dy.is_stochastic and not drawn.wgrad.dy.is_stochastic
    assert not recipe("ti2d_rows").wgrad.x.is_square
    assert recipe("ti2d_nearest_dy").wgrad.dy.rounding == NEAREST
    assert recipe("ti2d_block_8").fprop.x.block == (8, 8)
    assert recipe("ue5m3_every_200").fprop.x.tensor_scale.every == 200
    assert "mxfp8" not in str(POLICIES["ti2d_fp4_qk"](SHAPES["dense_2m"]).rules)


def test_every_variant_is_in_a_study():
    runs = [run for name in STUDIES for run in about(name).queue(Found([]), 2e-3)]
    unused = set(POLICIES) - {run.policy for run in runs}
    assert unused == {"mxfp4_tseng", "mxfp8", "four_over_six", "int2"}


def test_noise_varies_one_thing_at_a_time():
    base = ablation.base(Found([]), 2e-3)
    for run in noise.runs(base):
        changed = dict(run.piece.items() - base.piece.items()).keys() - {"policy"}
        assert changed <= {"noise", "lr"} or changed <= {"noise", "model", "tokens"}


def test_deviations_of_noise_have_intervals():
    assert noise._spread(None, 1) == ("", "")
    # For n = 6 it is known within a factor of 0.62 to 2.45.
    assert noise._spread(0.01, 6) == ("0.0100", "0.0062 to 0.0245")


def test_the_law_that_made_the_losses_is_found():
    true, flops = Law(1.5, 1.2, 0.15), np.geomspace(1e15, 1e18, 5)
    points = [Point(c, float(true(c))) for c in flops]
    np.testing.assert_allclose(fit.law(points), true, rtol=1e-3)
    *_, power = fit.intervals(fit.law, points, noise=Deviation(1e-3, 8))
    assert power.low < true.power < power.high
    *_, power = fit.intervals(fit.law, points, noise=None)
    assert math.isnan(power.low)


def test_the_slope_is_of_a_tenfold_compute():
    points = [Point(10.0**n, 3.0 - 0.5 * n) for n in range(3)]
    assert fit.slope(points) == pytest.approx(-0.5)


def test_an_interval_of_a_slope_is_that_of_student():
    points = [Point(10.0**n, 0.0) for n in range(4)]
    of = lambda points: [fit.slope(points)]
    (found,) = fit.intervals(of, points, noise=Deviation(0.1, 3))
    error = 0.1 / math.sqrt(5)  # the exponents are 5 squares from their mean
    width = stats.t.ppf(0.975, 3) * error
    assert found.high == pytest.approx(width, rel=0.2)
    assert found.low == pytest.approx(-width, rel=0.2)


@pytest.mark.parametrize("function", [fit.law, fit.slope])
def test_one_compute_is_not_enough(function):
    with pytest.raises(ValueError, match="different computes, got 1"):
        function([Point(1.0, 2.0), Point(1.0, 2.1)])


def test_smaller_differences_need_more_seeds():
    assert fit.seeds_needed(1.0, 0.5) == 2
    assert fit.seeds_needed(0.1, 0.5) == 200
    assert fit.seeds_needed(0.1, None) is None


def test_deviation_is_pooled_over_computes():
    points = [Point(1.0, 0.0), Point(1.0, 2.0), Point(2.0, 5.0), Point(2.0, 7.0)]
    assert fit.deviation(points) == (pytest.approx(math.sqrt(2)), 2)
    assert fit.deviation(points[::2]) is None


def test_time_is_that_of_the_device():
    rows = [{"seconds": 60.0, "lanes": 0}, {"seconds": 90.0, "lanes": 3}]
    assert budget.minutes(rows) == pytest.approx(1.5)


def test_gaps_over_compute_are_to_bf16_of_the_same_model_and_seed():
    runs = [run for run in about("scaling").queue(Found([]), 2e-3) if run.lr == 2e-3]
    found = report.gaps([made_up(run) for run in runs])
    assert set(found) == {"e2m1_ref", "ufp4"}
    assert all(abs(point.value - 1) < 0.5 for point in found["ufp4"])
