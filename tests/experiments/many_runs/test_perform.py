import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.many_runs import perform
from tests.experiments.many_runs.cases import RUN


def test_a_slow_first_call_is_no_reason_to_leave_a_run_out(bytes_of_two, corpus):
    """It waits for what came before it; here it takes a hundred times as long."""
    calls = []

    def advance(state, whole, rows, rates):
        time.sleep(0.01 if calls else 1)
        calls.append(len(rates))
        return state, {"loss": np.ones(len(rates))}

    alone = SimpleNamespace(
        start=lambda seed, noise: SimpleNamespace(skipped_in_row=0),
        advance=advance,
    )
    run = dataclasses.replace(RUN, at_once=1)
    setting = SimpleNamespace(
        corpus=corpus, data=bytes_of_two, whole=None, deadline=time.time() + 6
    )
    perform._train(alone, run, setting)
    assert calls == [1] * run.steps
    setting.deadline = time.time() + 1
    with pytest.raises(perform.TooLong):
        perform._train(alone, run, setting)
