"""Tables in log files."""

from experiments.terminal import console


def test_what_is_no_terminal_has_a_width_of_its_own(capsys):
    console(100).print("a" * 90)
    assert capsys.readouterr().out == "a" * 90 + "\n"
