"""What processes of a run agree on: texts, failures, and that they run the same."""

import json
import textwrap

import pytest

from experiments import agreement

TWO = """
    import json, os, time
    from experiments import agreement, processes
    processes.initialize(timeout=60)
    me = int(os.environ["JAX_PROCESS_ID"])

    def outcome(fails_in, error):
        try:
            with agreement.agreed():
                if me in fails_in:
                    raise error
        except Exception as found:
            return [type(found).__name__, str(found)]

    def difference(value):
        try:
            agreement.check_same(value)
        except ValueError as found:
            return str(found)

    time.sleep(0.2 * me)
    print(json.dumps([
        agreement.of_first(f"of {me}"),
        outcome([], None),
        outcome([1], OSError("no disk")),
        outcome([0, 1], TypeError(f"in {me}")),
        outcome([1], KeyError("bug")),
        difference({"steps": 5}),
        difference({"steps": 5 + me}),
    ]))
"""


def test_two_processes_agree(together):
    out = together(textwrap.dedent(TWO))
    zero, one = (json.loads(line[4:]) for line in sorted(out.splitlines()))
    assert zero[:2] == one[:2] == ["of 0", None]
    assert zero[2] == ["ValueError", "process 1: no disk"]
    assert one[2] == ["OSError", "no disk"]
    assert zero[3] == ["TypeError", "in 0"] and one[3] == ["TypeError", "in 1"]
    assert zero[4] == ["RuntimeError", "process 1: 'bug'"]
    assert one[4] == ["KeyError", "'bug'"]
    assert zero[5] is one[5] is None
    assert "but process 0 has steps=5, not 6. Give all" in zero[6]
    assert zero[6] == f"process 1: {one[6]}"


def test_a_process_by_itself_agrees_at_once():
    assert agreement.is_first() and agreement.of_first("mine") == "mine"
    agreement.check_same({"steps": 5})
    with pytest.raises(KeyError, match="bug"), agreement.agreed():
        raise KeyError("bug")
