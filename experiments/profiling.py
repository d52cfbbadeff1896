"""Traces of a few training steps, recorded by JAX's profiler."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from experiments import named


@dataclasses.dataclass(frozen=True)
class Profile:
    """Which steps to trace, and where to write.

    Attributes:
      first: 1 for the first of a run, which compiles.
      last: included.
      folder: gets a folder `POLICY` for each policy.
    """

    first: int
    last: int
    folder: Path

    @classmethod
    def parse(cls, text: str, *, steps: int, folder: Path) -> Self:
        """Returns what `--profile FIRST:LAST` asks for.

        Raises:
          ValueError: other text, or steps that a run does not have.
        """
        first, colon, last = text.partition(":")
        is_written = colon and first.isdecimal() and last.isdecimal()
        if not is_written or not 1 <= int(first) <= int(last) <= steps:
            raise ValueError(
                "--profile: must read FIRST:LAST with 1 <= FIRST <= LAST <= --steps="
                f"{steps}, got {text!r}."
            )
        return cls(int(first), int(last), folder)


class Tracer:
    """Traces the steps of one run that a profile names; of no profile, none.

    As a context, it ends a trace that the run does not come to the end of.

    Args:
      profile: or None.
      name: of the folder for this run.
    """

    def __init__(self, profile: Profile | None, name: str):
        self._profile, self._name = profile, name
        self._is_on = False
        self._step: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self._stop()

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the training step, which traces itself when its time has come."""
        if self._profile is None:
            return step
        first, last = self._profile.first, self._profile.last

        def traced(state: Any, batch: Any) -> Any:
            if self._step is None:
                self._step = int(state.step)  # of a run that goes on, not 0
            self._step += 1
            if not first <= self._step <= last:
                return step(state, batch)
            if not self._is_on:
                jax.block_until_ready(state)  # so that no earlier step is in it
                self._start()
            with jax.profiler.StepTraceAnnotation("train", step_num=self._step):
                found = step(state, batch)
            if self._step == last:
                jax.block_until_ready(found)
                self._stop()
            return found

        return traced

    def _start(self) -> None:
        assert self._profile is not None
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # of a few steps, it would be most of the file
        folder = self._profile.folder / named.file_name(self._name)
        jax.profiler.start_trace(folder, profiler_options=options)
        self._is_on = True

    def _stop(self) -> None:
        if self._is_on:
            self._is_on = False
            jax.profiler.stop_trace()
