"""Tables in log files, and what commands say."""

import subprocess
import sys

import pytest

from experiments import terminal
from experiments.terminal import console


def test_what_is_no_terminal_has_a_width_of_its_own(capsys):
    console(100).print("a" * 90)
    assert capsys.readouterr().out == "a" * 90 + "\n"


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, OSError])
def test_what_a_command_cannot_do_is_one_line(error, capsys, monkeypatch):
    def main() -> None:
        raise error("this is missing. Bring it.")

    monkeypatch.setattr(sys, "argv", ["command"])
    assert terminal.command(main) == 2
    assert capsys.readouterr().err == "error: this is missing. Bring it.\n"


def test_a_command_ends_with_its_status(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command", "--status", "3"])

    def main(*, status: int) -> int:
        return status

    assert terminal.command(main) == 3


def test_help_names_the_command_as_it_is_typed():
    command = [sys.executable, "-m", "experiments.kernels.show", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: python -m experiments.kernels.show [-h]")
    assert "\n    python -m experiments.kernels.show steps.jsonl" in shown
