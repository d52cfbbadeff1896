import dataclasses
import json
import time

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.many_runs import budget, command, program, queue, text
from experiments.many_runs.command import Study
from experiments.many_runs.queue import How
from experiments.many_runs.run import Run
from experiments.many_runs.shapes import SHAPES
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
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = "the scale of a block follows from its largest magnitude".split()
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        texts = (" ".join(rng.choice(words, 60)) for _ in range(60))
        (folder / f"{name}.txt").write_text("\n\0\n".join(texts))
    domains = [
        {"name": name, "source": f"{name}.txt", "weight": weight}
        for name, weight in (("one", 1), ("two", 2))
    ]
    path = folder / "mixture.json"
    path.write_text(json.dumps({"domains": domains}))
    return DataConfig(source=str(path), tokenizer="bytes", vocab_size=257)


@pytest.fixture(scope="module")
def corpus(config):
    return data.load_corpus(config)


def test_the_text_on_the_device_is_what_the_trainer_draws(config, corpus):
    whole, rows = text.read(corpus, RUN.length), RUN.batches(config)
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
        ("bf16", "tiny", 0),
        ("ufp4", "tiny", 2),
        ("ufp4", "tiny", 0),
        ("ue5m3", "tiny", 2),
        ("bf16", "moe_tiny", 2),
    ],
)
def test_losses_are_those_of_the_trainer(policy, model, lanes, config, corpus):
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
    orders = [text.orders(corpus, r.batches(config), steps=4) for r in runs]
    for first in range(0, run.steps, run.at_once):
        rates = stack([r.rates[first : first + run.at_once] for r in runs])
        rows = stack([next(order) for order in orders])
        state, metrics = advance(state, whole, rows, rates)
        found += np.atleast_2d(metrics["loss"])[-1].tolist()
    np.testing.assert_allclose(found, _trainer(run, config, corpus), rtol=1e-5)


def _trainer(run, config, corpus):
    """Returns the losses of `train.make_train_step` on the trainer's own batches."""
    optimizer = train.make_optimizer(run.optim, steps=run.steps)
    rngs = nnx.Rngs(params=run.seed, quant=run.noise)
    model = models.Transformer(run.shape(257), run.whole_policy(257), rngs=rngs)
    graph, state = train.make_state(model, optimizer.transform)
    step, losses = train.make_train_step(graph, optimizer), []
    batches = data.train_batches(corpus, run.batches(config))
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


def test_every_policy_suits_every_shape():
    for shape in SHAPES.values():
        for policy in POLICIES.values():
            policy(shape).check(shape.layer_paths)


def test_a_run_costs_what_one_like_it_took(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    guess, is_measured = budget.seconds(RUN, results)
    assert not is_measured and guess > 0
    results.add(RUN.piece | {"tokens_per_s": 512.0})
    longer = dataclasses.replace(RUN, tokens=100 * 2 * 64, seed=1)
    cost, is_measured = budget.seconds(longer, results)
    assert is_measured
    assert cost == pytest.approx(100 * 2 * 64 / 512, abs=5)


def _study(folder, runs):
    return Study(
        folder=folder,
        queue=lambda results: runs,
        tiny=lambda: runs,
        parts=lambda results, folder: {"rows": f"{len(results.rows)} rows"},
    )


def test_a_command_trains_what_is_missing_and_shows_it(config, tmp_path, capsys):
    runs = [RUN, dataclasses.replace(RUN, seed=4, lr=1e-3)]
    flags = ["--data", config.source, "--out", str(tmp_path), "--tiny"]
    # A mixture of bytes: what `--data` alone decides is BPE.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "DataConfig", lambda source: config)
        study = _study(tmp_path, runs)
        assert command.main(study, flags) == 0
        rows = Results(tmp_path / "results.jsonl").rows
        assert [row["seed"] for row in rows] == [3, 4]
        assert command.main(study, flags) == 0
    assert "2 rows" in capsys.readouterr().out
    row = rows[0]
    assert len(row["losses"]) == 2 and row["steps"] == 8 and not row["diverged"]
    assert set(row["heldout"]["bf16"]) == {"all", "one", "two"}
    assert "own" not in row["heldout"]  # nothing is quantized


def test_a_run_that_would_take_too_long_is_left_out(tmp_path, capsys, config):
    results = Results(tmp_path / "results.jsonl")
    results.add(dataclasses.replace(RUN, seed=9).piece | {"tokens_per_s": 1.0})
    how = How(data=config, out=results.path, deadline=time.time() + 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "compiled", lambda *args, **kwargs: None)
        queue.train([RUN], how, jobs=1)
    assert "left out" in capsys.readouterr().out
    assert len(Results(results.path).rows) == 1
