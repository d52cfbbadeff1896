from experiments.ablation import noise
from experiments.ablation import study as ablation
from experiments.many_runs.found import Found


def test_noise_varies_one_thing_at_a_time():
    base = ablation.base(Found([]), 2e-3)
    for run in noise.runs(base):
        changed = dict(run.piece.items() - base.piece.items()).keys() - {"policy"}
        larger = {"noise", "model", "tokens", "rows"}
        seeds = {"noise", "seed", "lr"}
        assert changed <= seeds or changed <= larger


def test_deviations_of_noise_have_intervals():
    assert noise._spread(None, 1) == ("", "")
    # For n = 6 it is known within a factor of 0.62 to 2.45.
    assert noise._spread(0.01, 6) == ("0.0100", "0.0062 to 0.0245")
