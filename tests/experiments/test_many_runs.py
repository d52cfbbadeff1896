import dataclasses
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import record
from experiments.kernels.in_turn import ProcessDied
from experiments.many_runs import (
    budget,
    command,
    figure,
    found,
    perform,
    program,
    queue,
    show,
    text,
)
from experiments.many_runs.command import Study
from experiments.many_runs.found import STUDIES, Found
from experiments.many_runs.gaps import Deviation, Gap, gaps, pooled, spread, verdict
from experiments.many_runs.queue import How, Task
from experiments.many_runs.run import Run
from experiments.many_runs.shapes import SHAPES
from experiments.many_runs.tuning import RATES, tuned, tuning
from experiments.many_runs.variants import POLICIES
from experiments.study import Results
from fp4jax import data, models, train
from fp4jax.data import DataConfig
from fp4jax.data.packing import Rows

RUN = Run(
    policy="bf16",
    model="tiny",
    tokens=8 * 2 * 64,
    lr=2e-3,
    seed=3,
    noise=5,
    rows=2,
    length=64,
    at_once=4,
)


@pytest.fixture(scope="module")
def corpus(bytes_of_two):
    return data.load_corpus(bytes_of_two)


def test_the_text_on_the_device_is_what_the_trainer_draws(bytes_of_two, corpus):
    whole, rows = text.read(corpus, RUN.length), RUN.batches(bytes_of_two)
    batches, orders = (
        data.train_batches(corpus, rows),
        text.orders(corpus, rows, steps=2),
    )
    for order in (next(orders), next(orders)):
        for each in order:
            found = text.batch(whole, each)
            for name, value in text.without_documents(next(batches)).items():
                np.testing.assert_array_equal(found[name], value)


def test_rows_end_in_padding_as_those_of_the_trainer_do(corpus):
    whole = text.read(corpus, RUN.length)
    rows = Rows(corpus.domains[0].train, RUN.length)
    last = rows[np.arange(len(rows) - 2, len(rows))]
    found = text.batch(whole, np.arange(len(rows) - 2, len(rows)))
    assert last["loss_mask"].min() == 0
    for name, value in text.without_documents(last).items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    ("policy", "model", "lanes"),
    [
        ("ufp4", "tiny", 2),
        ("ufp4", "tiny", 0),
        ("ue5m3", "tiny", 2),
        ("bf16", "moe_tiny", 2),
    ],
)
def test_losses_are_those_of_the_trainer(policy, model, lanes, bytes_of_two, corpus):
    run = dataclasses.replace(RUN, policy=policy, model=model)
    other = dataclasses.replace(run, lr=5e-4, seed=4, noise=6)
    runs = [other, run] if lanes else [run]
    functions, whole = program.functions(run, 257), text.read(corpus, run.length)
    start, advance = functions.start, functions.advance
    stack = lambda values: np.stack(values) if lanes else values[0]
    if lanes:
        start, advance = jax.vmap(start), jax.vmap(advance, in_axes=(0, None, 0, 0))
    advance, found = jax.jit(advance, compiler_options=functions.options), []
    state = jax.jit(start)(
        *(stack([np.uint32(getattr(r, n)) for r in runs]) for n in ("seed", "noise"))
    )
    orders = [text.orders(corpus, r.batches(bytes_of_two), steps=4) for r in runs]
    for first in range(0, run.steps, run.at_once):
        rates = stack([r.rates[first : first + run.at_once] for r in runs])
        rows = stack([next(order) for order in orders])
        state, metrics = advance(state, whole, rows, rates)
        found += np.atleast_2d(metrics["loss"])[-1].tolist()
    np.testing.assert_allclose(found, _trainer(run, bytes_of_two, corpus), rtol=1e-5)


def _trainer(run, bytes_of_two, corpus):
    """Returns the losses of `train.make_train_step` on the trainer's own batches."""
    optimizer = train.make_optimizer(run.optim, steps=run.steps)
    rngs = nnx.Rngs(params=run.seed, quant=run.noise)
    model = models.Transformer(run.shape(257), run.whole_policy(257), rngs=rngs)
    graph, state = train.make_state(model, optimizer.transform)
    step, losses = train.make_train_step(graph, optimizer), []
    batches = data.train_batches(corpus, run.batches(bytes_of_two))
    for _ in range(run.steps):
        state, metrics = step(state, text.without_documents(next(batches)))
        losses.append(float(metrics["loss"]))
    return losses


def test_rates_are_those_of_the_schedule():
    schedule = train.make_schedule(RUN.optim, steps=RUN.steps)
    np.testing.assert_allclose(RUN.rates, [schedule(i) for i in range(RUN.steps)])


def test_runs_share_a_program_where_only_numbers_differ(tmp_path):
    how = How(data=DataConfig(), out=tmp_path / "r", deadline=0.0, lanes=2)
    seeds = [dataclasses.replace(RUN, seed=seed) for seed in range(3)]
    other = dataclasses.replace(RUN, policy="ufp4")
    found = [task.runs for task in queue.tasks([*seeds[:2], other, seeds[2]], how)]
    assert found == [tuple(seeds[:2]), (seeds[2],), (other,)]
    longer = dataclasses.replace(RUN, tokens=2 * RUN.tokens)
    assert [task.runs for task in queue.tasks([RUN, longer], how)] == [
        (RUN,),
        (longer,),
    ]
    alone = dataclasses.replace(how, lanes=1)
    assert [task.runs for task in queue.tasks([RUN, longer], alone)] == [(RUN, longer)]


def test_every_policy_suits_every_shape():
    for shape in SHAPES.values():
        for policy in POLICIES.values():
            policy(shape).check(shape.layer_paths)


def row(run, loss=2.0, **fields):
    heldout = {"bf16": {"all": {"loss": loss}}}
    return run.piece | {"heldout": heldout, "tokens_per_s": 1.0, "diverged": 0} | fields


def test_a_run_costs_what_one_like_it_took():
    guess, is_measured = budget.seconds(RUN, Found([]))
    assert not is_measured and guess > 0
    found = Found([row(RUN, tokens_per_s=512.0)])
    longer = dataclasses.replace(RUN, tokens=100 * 2 * 64, seed=1)
    cost, is_measured = budget.seconds(longer, found)
    assert is_measured
    assert cost == pytest.approx(100 * 2 * 64 / 512, abs=5)


def test_the_rate_is_that_of_the_least_loss_once_all_are_there():
    rows = [
        row(run, loss=abs(run.lr - RATES[2])) for run in tuning("dense_2m", 10_000_000)
    ]
    assert tuned(Found(rows), "dense_2m", 10_000_000) == RATES[2]
    rows[2] |= {"diverged": True}
    assert tuned(Found(rows), "dense_2m", 10_000_000) == RATES[1]
    assert tuned(Found(rows[1:]), "dense_2m", 10_000_000) is None
    assert tuned(Found(rows[1:]), "dense_2m", 10_000_000, assumed=0.5) == 0.5


def test_gaps_are_taken_seed_by_seed():
    runs = [dataclasses.replace(RUN, seed=seed, noise=seed) for seed in range(2)]
    fp4 = [dataclasses.replace(run, policy="ufp4") for run in runs]
    losses = dict(zip([*runs, *fp4], (2.0, 4.0, 2.02, 4.08), strict=True))
    found = gaps([row(run, loss) for run, loss in losses.items()])
    assert found[1].gaps == pytest.approx((1.0, 2.0))
    assert found[1].own_gaps == found[1].gaps
    assert spread(found) == pytest.approx((np.std((1.0, 2.0), ddof=1), 1))


def test_the_deviation_is_within_groups_of_what_is_finite():
    groups = [(0.0, 2.0), (5.0, 7.0, np.nan), (9.0,)]
    assert pooled(groups) == pytest.approx((np.sqrt(2), 2))
    assert pooled(groups[2:]) is None


@pytest.mark.parametrize("count", [2, 6])
def test_curves_are_means_of_the_last_losses(count):
    rows = [{"policy": "bf16", "losses": [1.0] * count}] * 2
    curve = figure.curves(rows)["bf16"]
    np.testing.assert_allclose(curve.values, 1.0)
    assert curve.ends.tolist() == list(range(min(count, 5), count + 1))


@pytest.mark.parametrize(
    ("mean", "deviation", "expected"),
    [
        (1.0, Deviation(0.1, 4), "worse"),
        (-1.0, Deviation(0.1, 4), "better"),
        (0.1, Deviation(0.1, 4), "within seeds"),
        (0.35, Deviation(0.1, 4), "within seeds"),  # t is 2.78
        (0.35, Deviation(0.1, 20), "worse"),  # and 2.09
        (1.0, None, "not known"),
        (np.nan, Deviation(0.1, 4), "diverged"),
    ],
)
def test_a_verdict_is_by_student_s_t(mean, deviation, expected):
    gap = lambda value: Gap(
        policy="p",
        losses=(2.0,),
        gaps=(value,),
        own_gaps=(),
        tokens_per_s=1.0,
        diverged=0,
    )
    assert verdict(gap(mean), gap(0.0), deviation) == expected


def test_a_verdict_is_by_the_spread_of_both():
    gap = lambda *values: Gap(
        policy="p",
        losses=values,
        gaps=values,
        own_gaps=(),
        tokens_per_s=1.0,
        diverged=0,
    )
    noisy, calm = gap(-1.0, 0.0, 1.0), gap(0.9, 1.0, 1.1)
    of_all = Deviation(0.3, 18)  # most are calm
    assert verdict(noisy, calm, of_all) == "within seeds"
    assert verdict(gap(2.9, 3.0, 3.1), calm, Deviation(3.0, 18)) == "worse"
    assert verdict(gap(0.0), calm, of_all) == "better"  # its own is not known


def test_a_rate_at_an_end_of_the_grid_is_named():
    tokens = {"dense_2m": 10_000_000, "dense_4m": 20_000_000}
    rows = [row(run, loss=1 + run.lr) for run in tuning("dense_2m", 10_000_000)]
    rows += [
        row(run, loss=abs(run.lr - RATES[1])) for run in tuning("dense_4m", 20_000_000)
    ]
    page = show.of_rates(Found(rows), tokens)
    assert page.endswith("At an end of the rates that were tried: `dense_2m`.")
    assert "At an end" not in show.of_rates(Found(rows[4:]), tokens)


def test_a_slow_first_call_is_no_reason_to_leave_a_run_out(bytes_of_two, corpus):
    """It waits for what came before it; here it takes a hundred times as long."""
    calls = []

    def advance(state, whole, rows, rates):
        time.sleep(0.01 if calls else 1)
        calls.append(len(rates))
        return state, {"loss": np.ones(len(rates))}

    alone = SimpleNamespace(
        lanes=0,
        start=lambda seed, noise: SimpleNamespace(skipped_in_row=0),
        advance=advance,
    )
    run = dataclasses.replace(RUN, at_once=1)
    setting = SimpleNamespace(
        corpus=corpus, data=bytes_of_two, whole=None, deadline=time.time() + 6
    )
    perform._train(alone, [run], setting)
    assert calls == [1] * run.steps
    setting.deadline = time.time() + 1
    with pytest.raises(perform.TooLong):
        perform._train(alone, [run], setting)


def _study(folder, runs):
    return Study(
        folder=folder,
        queue=lambda found, assumed: runs,
        tiny=runs,
        parts=lambda found, folder: {"rows": f"{len(found.rows)} rows"},
    )


def test_a_command_trains_what_is_missing(bytes_of_two, corpus, tmp_path, capsys):
    runs = [RUN, dataclasses.replace(RUN, seed=4, lr=1e-3)]
    flags = ["--data", bytes_of_two.source, "--out", str(tmp_path), "--tiny"]
    # A mixture of bytes: what `--data` alone decides is BPE.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "DataConfig", lambda source: bytes_of_two)
        study, commit = _study(tmp_path, runs), record.git_sha()
        patch.setattr(record, "git_sha", lambda: "dirty")  # once rows are added
        assert command.main(study, flags) == 0
        rows = Results(tmp_path / "results.jsonl").rows
        assert [row["seed"] for row in rows] == [3, 4]
        assert {row["git"] for row in rows} == {commit}
        assert command.main(study, flags) == 0
        other = dataclasses.replace(bytes_of_two, holdout=0.5)
        patch.setattr(command, "DataConfig", lambda source: other)
        assert command.main(study, flags) == 2
    assert Results(tmp_path / "results.jsonl").rows == rows
    out, err = capsys.readouterr()
    assert " rows" in out and "--data: losses on one text are compared, got 2" in err
    found = rows[0]
    assert found["steps"] == 8 and not found["diverged"]
    losses = np.reshape(_trainer(RUN, bytes_of_two, corpus), (2, 4)).mean(1)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    assert set(found["heldout"]["bf16"]) == {"all", "one", "two"}
    assert "own" not in found["heldout"]  # nothing is quantized


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--only", "bf16", "ufp5"], "--only: must name policies of the study, bf16, "),
        (["--jobs", "0"], "--jobs: must be at least 1, got 0"),
        (["--lanes", "0"], "--lanes: must be at least 1, got 0"),
    ],
)
def test_a_command_says_what_it_cannot_do(flags, expected, tmp_path, capsys):
    about = _study(tmp_path, [RUN])
    assert command.main(about, ["--dry", *flags]) == 2
    assert expected in capsys.readouterr().err


def test_a_command_that_lost_a_process_says_so(tmp_path, monkeypatch, bytes_of_two):
    monkeypatch.setattr(command, "DataConfig", lambda source: bytes_of_two)
    died = lambda prepare, tasks, jobs: [ProcessDied("of a signal") for _ in tasks]
    monkeypatch.setattr(queue, "in_turn", died)
    flags = ["--data", bytes_of_two.source, "--out", str(tmp_path), "--tiny"]
    assert command.main(_study(tmp_path, [RUN]), flags) == 1


def test_runs_of_studies_count_on_their_own_text(tmp_path, monkeypatch):
    monkeypatch.setattr(found, "_FOLDER", tmp_path)
    runs = [dataclasses.replace(RUN, seed=seed) for seed in range(3)]
    for folder, run, corpus in zip(("", *STUDIES[:2]), runs, "abb", strict=True):
        Results(tmp_path / folder / "results.jsonl").add(row(run, corpus=corpus))
    of = lambda name, **text: [
        r["seed"] for r in Found.of(tmp_path / name / "results.jsonl", **text).rows
    ]
    assert of("") == [0] and of(STUDIES[0]) == [1, 2]
    assert of("none") == [1, 2] and of("none", corpus="a") == []
    with pytest.raises(ValueError, match="one text are compared, got 2"):
        of("", corpus="b")


def test_a_run_that_would_take_too_long_is_left_out(tmp_path, capsys, bytes_of_two):
    results = Results(tmp_path / "results.jsonl")
    results.add(row(dataclasses.replace(RUN, seed=9)))
    how = How(data=bytes_of_two, out=results.path, deadline=time.time() + 60)
    with pytest.MonkeyPatch.context() as patch:
        nothing = SimpleNamespace(lanes=0)
        patch.setattr(queue, "compiled", lambda *args, **kwargs: nothing)
        assert queue.prepare(Task((RUN,), how))() == 0
    assert "left out" in capsys.readouterr().out
    assert len(Results(results.path).rows) == 1
