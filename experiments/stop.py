"""Requests to stop: a signal ends a run after the step that it falls into."""

import signal
from types import FrameType
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils


class Stop:
    """Is true from the first SIGTERM or SIGINT on; a second SIGINT interrupts at once.

    Attributes:
      signal: which came first, or None.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Returns whether to stop, which all processes of a run agree on."""
        if jax.process_count() == 1:
            return self.signal is not None
        mine = np.int32(self.signal or 0)
        newest = int(multihost_utils.process_allgather(mine).max())
        if newest and self.signal is None:
            self.signal = signal.Signals(newest)
        return bool(newest)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
