"""Which steps are traced, whatever becomes of the run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from experiments.profiling import Profile, Tracer


@pytest.fixture
def trace(monkeypatch):
    """What the profiler was asked for, and the steps in between."""
    found = []
    start = lambda folder, **_: found.append(f"start {folder.name}")
    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


def run(trace, tracer, *, start, end, phases=1):
    """Runs the steps after `start`, with a step of its own for each phase."""
    with tracer:
        state = SimpleNamespace(step=jnp.int32(start))
        for _ in range(phases):

            def step(state, batch):
                trace.append(int(state.step) + 1)
                return SimpleNamespace(step=state.step + 1), {}

            traced = tracer(step)
            for _ in range((end - start) // phases):
                state, _ = traced(state, {})


def profile(tmp_path, text="3:4"):
    return Profile.parse(text, steps=10, folder=tmp_path)


@pytest.mark.parametrize("phases", [1, 2, 3])
def test_the_steps_named_are_traced(tmp_path, trace, phases):
    run(trace, Tracer(profile(tmp_path), "ufp4"), start=0, end=6, phases=phases)
    assert trace == [1, 2, "start ufp4", 3, 4, "stop", 5, 6]


def test_a_run_that_goes_on_counts_from_its_start(tmp_path, trace):
    run(trace, Tracer(profile(tmp_path), "ufp4"), start=3, end=6)
    assert trace == ["start ufp4", 4, "stop", 5, 6]


def test_a_run_that_went_by_or_has_no_profile_is_not_traced(tmp_path, trace):
    run(trace, Tracer(profile(tmp_path), "ufp4"), start=4, end=6)
    run(trace, Tracer(None, "ufp4"), start=0, end=4)
    assert trace == [5, 6, 1, 2, 3, 4]


def test_a_run_that_ends_in_between_ends_its_trace(tmp_path, trace):
    with pytest.raises(KeyboardInterrupt), Tracer(profile(tmp_path), "ufp4") as tracer:

        def step(state, batch):
            raise KeyboardInterrupt

        tracer(step)(SimpleNamespace(step=jnp.int32(2)), {})
    assert trace == ["start ufp4", "stop"]


def test_a_trace_is_left_in_the_folder_of_the_policy(tmp_path):
    @jax.jit
    def add(step):
        return step + 1

    def step(state, batch):
        return SimpleNamespace(step=add(state.step)), {}

    with Tracer(profile(tmp_path, "1:1"), "ufp4") as tracer:
        tracer(step)(SimpleNamespace(step=jnp.int32(0)), {})
    assert list(tmp_path.glob("ufp4/**/*.xplane.pb"))
