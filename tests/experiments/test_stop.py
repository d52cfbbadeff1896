"""Signals that ask a run to stop."""

import os
import signal

import pytest

from experiments.stop import Stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop() and stop.signal is None
        os.kill(os.getpid(), number)
        assert stop() and stop.signal == number
    assert signal.getsignal(number) == before


def test_a_second_interrupt_interrupts_at_once():
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGTERM
