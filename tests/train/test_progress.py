"""What a run shows on a terminal, and where no one watches."""

import io

import pytest
from rich.console import Console

from fp4jax.train import Progress


def show(updates, *, steps, terminal):
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        force_interactive=terminal,
        width=100,
        color_system=None,
    )
    with Progress("ufp4", steps=steps, console=console) as progress:
        for update in updates:
            progress.update(update)
    return console.file.getvalue()


def record(step, **changes):
    return {"step": step, "loss": 4.5, "tokens_per_s": 12_345.6, "mfu": None} | changes


def test_a_log_file_gets_about_ten_plain_lines():
    updates = [[record(1, tokens_per_s=None)]]
    updates += [[record(step)] for step in range(10, 301, 10)]
    lines = show(updates, steps=300, terminal=False).splitlines()
    assert lines[0] == "ufp4  step 1/300  loss 4.5000"
    assert lines[1] == "ufp4  step 40/300  loss 4.5000  12,346 tokens/s"
    assert lines[-1].startswith("ufp4  step 300/300")
    assert 10 <= len(lines) <= 12


def test_a_terminal_gets_a_bar():
    shown = show([[record(5), record(6, mfu=0.345)]], steps=12, terminal=True)
    assert "6/12" in shown
    assert "loss 4.5000" in shown
    assert "34.5% MFU" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_fails_at_once_leaves_no_trace_of_a_loss(terminal):
    assert "loss" not in show([], steps=12, terminal=terminal)
