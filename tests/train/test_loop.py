"""When the loop hands over, what it measures, and when it stops."""

import dataclasses
import itertools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax import policies, recipes
from fp4jax.models import Transformer, flops_per_token
from fp4jax.policies import Schedule
from fp4jax.train import (
    Diverged,
    OptimConfig,
    TrainState,
    evaluate,
    make_eval_step,
    make_optimizer,
    make_state,
    make_train_step,
    train,
    train_phases,
)
from tests.cases import SMALL, in_mlp_down

BATCH = {"inputs": np.zeros((2, 8), np.int32)}


def state_at(step):
    empty = nnx.State({})
    return TrainState(
        step=jnp.int32(step),
        params=empty,
        opt_state=(),
        held=empty,
        rest=empty,
        skipped=jnp.int32(0),
        skipped_in_row=jnp.int32(0),
    )


@jax.jit
def count(state, batch):
    """A step whose loss is its number."""
    step = state.step + 1
    metrics = {"loss": jnp.float32(step), "grad_norm": jnp.float32(1)}
    return dataclasses.replace(state, step=step), metrics


def hand_overs(batches=None, *, start=0, **options):
    batches = itertools.repeat(BATCH) if batches is None else batches
    runs = train(count, state_at(start), batches, flops_per_token=1.0, **options)
    return [(int(state.step), records) for state, records in runs]


@pytest.mark.parametrize(
    ("start", "ends"),
    [(0, [1, 4, 8, 10]), (3, [4, 8, 10]), (4, [5, 8, 10]), (9, [10]), (10, [])],
)
def test_the_first_step_alone_then_multiples_and_the_end(start, ends):
    found = hand_overs(start=start, steps=10, every=4)
    assert [step for step, _ in found] == ends
    records = [record for _, records in found for record in records]
    assert [record["step"] for record in records] == list(range(start + 1, 11))
    assert [record["loss"] for record in records] == list(range(start + 1, 11))


def test_speed_leaves_compilation_out():
    first, *others = [records for _, records in hand_overs(steps=20)]
    assert [record["tokens_per_s"] for record in first] == [None]
    assert all(record["tokens_per_s"] > 0 for record in sum(others, []))
    assert {record["mfu"] for record in sum(others, [])} == {None}  # of a CPU


def test_records_are_plain_json():
    for _, records in hand_overs(steps=3):
        assert json.loads(json.dumps(records)) == records


def test_no_more_batches_are_drawn_than_used():
    batches = iter([BATCH] * 10)
    hand_overs(batches, steps=7, every=4)
    assert len(list(batches)) == 3


def test_too_few_batches_raise():
    with pytest.raises(ValueError, match="one for each of 9 steps, got 5"):
        hand_overs([BATCH] * 5, steps=9)


@jax.jit
def skip_from_5_on(state, batch):
    """A step that is not finite from the fifth on."""
    state, metrics = count(state, batch)
    bad = state.step >= 5
    in_row = jnp.where(bad, state.skipped_in_row + 1, 0)
    metrics["loss"] = jnp.where(bad, jnp.nan, metrics["loss"])
    metrics["skipped"] = bad.astype(jnp.int32)
    return dataclasses.replace(state, skipped_in_row=in_row), metrics


def test_so_many_skipped_steps_in_a_row_end_the_training_and_are_handed_over():
    batches, found = itertools.repeat(BATCH), []
    runs = train(
        skip_from_5_on,
        state_at(0),
        batches,
        steps=20,
        every=2,
        flops_per_token=1.0,
        max_skips=3,
        diagnose=lambda state, batch: f"Found at {int(state.step)}.",
    )
    message = r"loss=nan.* at step 7, the last of 3 such in a row\. Found at 8\. Lower"
    with pytest.raises(Diverged, match=message) as raised:
        for _, records in runs:
            found += [record["step"] for record in records]
    assert found == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in raised.value.records] == [7]


@jax.jit
def skip_3_and_4(state, batch):
    """A step that is not finite twice, and then again."""
    state, metrics = count(state, batch)
    bad = (state.step == 3) | (state.step == 4)
    in_row = jnp.where(bad, state.skipped_in_row + 1, 0)
    metrics["skipped"] = bad.astype(jnp.int32)
    return dataclasses.replace(state, skipped_in_row=in_row), metrics


@pytest.mark.parametrize("every", [1, 3, 10])
def test_they_end_it_wherever_they_lie_between_two_hand_overs(every):
    runs = train(
        skip_3_and_4,
        state_at(0),
        itertools.repeat(BATCH),
        steps=20,
        every=every,
        flops_per_token=1.0,
        max_skips=2,
    )
    found = []
    message = "at step 4, the last of 2 such"
    with pytest.raises(Diverged, match=message) as raised:
        for _, records in runs:
            found += [record["step"] for record in records]
    found += [record["step"] for record in raised.value.records]
    assert found == [1, 2, 3, 4]


def test_a_diagnosis_that_fails_does_not_hide_the_divergence():
    def diagnose(state, batch):
        raise MemoryError

    runs = train(
        skip_from_5_on,
        state_at(0),
        itertools.repeat(BATCH),
        steps=9,
        flops_per_token=1.0,
        max_skips=2,
        diagnose=diagnose,
    )
    message = r"Where is not known \(MemoryError\)"
    with pytest.raises(Diverged, match=message):
        list(runs)


def test_fewer_skipped_steps_do_not():
    runs = train(
        skip_from_5_on,
        state_at(0),
        itertools.repeat(BATCH),
        steps=8,
        flops_per_token=1.0,
        max_skips=5,
    )
    assert [len(records) for _, records in runs] == [1, 7]


def test_hand_overs_fall_on_the_multiples_of_several_periods():
    assert [step for step, _ in hand_overs(steps=9, every=(4, 6))] == [1, 4, 6, 8, 9]


def test_stop_ends_the_training_with_the_step_after_which_it_is_true():
    asked = iter([False] * 5 + [True])
    found = hand_overs(steps=20, every=4, stop=lambda: next(asked))
    assert [step for step, _ in found] == [1, 4, 6]


def test_a_slow_source_of_batches_shows():
    def slowly():
        while True:
            time.sleep(0.02)
            yield BATCH

    *_, (_, records) = hand_overs(slowly(), steps=11)
    assert records[-1]["data_wait"] > 0.5


def test_evaluation_weighs_every_token_the_same():
    def losses(state, batch):
        return {"loss_sum": jnp.sum(batch["losses"] * batch["loss_mask"])}

    batches = [
        {
            "losses": np.array([[1.0, 2.0, 3.0, 4.0]]),
            "targets": np.array([[0, 1, 2, 1]]),
            "loss_mask": np.ones((1, 4), np.float32),
        },
        {
            "losses": np.array([[5.0, 9.0, 9.0, 9.0]]),
            "targets": np.array([[2, 2, 2, 2]]),
            "loss_mask": np.array([[1.0, 0, 0, 0]], np.float32),
        },
    ]
    token_bytes = np.array([0, 1, 4], np.int32)
    found = evaluate(losses, state_at(0), batches, token_bytes=token_bytes)
    assert found.nats_per_token == 15 / 5
    assert (found.tokens, found.bytes) == (5, 1 + 4 + 1 + 4)


def test_evaluation_of_nothing_raises():
    with pytest.raises(ValueError, match="must hold a token"):
        evaluate(count, state_at(0), [], token_bytes=np.zeros(2, np.int32))


def test_a_model_learns_a_sequence_that_repeats():
    config = dataclasses.replace(SMALL, vocab_size=16, num_layers=1)
    optimizer = make_optimizer(OptimConfig(lr=0.02), steps=30)
    model = Transformer(config, policies.bf16(config), rngs=nnx.Rngs(0))
    graph, state = make_state(model, optimizer.transform)
    rows = np.tile(np.arange(8, dtype=np.int32), (2, 5))
    batch = {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "segment_ids": np.ones((2, 39), np.int32),
        "positions": np.tile(np.arange(39, dtype=np.int32), (2, 1)),
        "loss_mask": np.ones((2, 39), np.float32),
    }
    runs = train(
        make_train_step(graph, optimizer),
        state,
        itertools.repeat(batch),
        steps=30,
        flops_per_token=flops_per_token(config, sequence_length=39),
    )
    for state, records in runs:
        last = records[-1]["loss"]
    token_bytes = np.ones(16, np.int32)
    found = evaluate(make_eval_step(graph), state, [batch], token_bytes=token_bytes)
    assert found.nats_per_token < last < 0.5
    assert found.tokens == found.bytes == 78


def test_phases_compile_once_each_and_share_the_state():
    fp4, finish = in_mlp_down(recipes.ufp4()), policies.bf16(SMALL)
    schedule = Schedule(((0, fp4), (3, finish)))
    optimizer = make_optimizer(OptimConfig(), steps=6)
    model = Transformer(SMALL, schedule, rngs=nnx.Rngs(0))
    _, start = make_state(model, optimizer.transform)
    traces = []

    def step_of(policy):
        def traced(step):
            traces.append(policy)  # the compiled step calls no Python
            return optimizer.schedule(step)

        model.set_policy(policy)
        return make_train_step(nnx.graphdef(model), optimizer._replace(schedule=traced))

    rows = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    batch = {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "segment_ids": np.ones((2, 8), np.int32),
        "positions": rows[:, :-1],
        "loss_mask": np.ones((2, 8), np.float32),
    }
    runs = train_phases(
        step_of,
        schedule,
        start,
        itertools.repeat(batch),
        steps=6,
        flops_per_token=1.0,
        every=2,
    )
    found = [[record["step"] for record in records] for _, records in runs]
    assert found == [[1], [2], [3], [4], [5, 6]]
    assert traces == [fp4, finish]


def test_a_run_resumed_in_a_later_phase_trains_under_its_policy():
    schedule = Schedule(((0, policies.ufp4(SMALL)), (4, policies.bf16(SMALL))))
    used = []

    def step_of(policy):
        def step(state, batch):
            used.append(policy)
            return count(state, batch)

        return step

    batches = itertools.repeat(BATCH)
    for _ in train_phases(
        step_of, schedule, state_at(3), batches, steps=6, flops_per_token=1.0
    ):
        pass
    assert used == [schedule.at(3), schedule.at(4), schedule.at(5)]
