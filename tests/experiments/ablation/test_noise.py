from experiments.ablation import noise
from experiments.many_runs.found import Found
from experiments.many_runs.tuning import tuned


def test_noise_varies_one_thing_at_a_time():
    models = "dense_2m", "dense_4m"
    small, larger = (tuned(Found([]), model, assumed=2e-3) for model in models)
    bases = {(b.model, b.lr): b for b in (noise.slowed(small), small, larger)}
    for run in noise.runs(small, larger):
        base = bases[run.model, run.lr]
        changed = dict(run.piece.items() - base.piece.items()).keys()
        together = {"seed"} if run.seed == run.noise else set()
        assert changed <= {"policy", "noise"} | together


def test_deviations_of_noise_have_intervals():
    assert noise._spread(None, 1) == ("", "")
    # For n = 6 it is known within a factor of 0.62 to 2.45.
    assert noise._spread(0.01, 6) == ("0.0100", "0.0062 to 0.0245")


def test_runs_without_an_onset_are_seen():
    assert noise._range([9.6, 30.2, 12.0]) == "10 to 30"
    assert noise._range([9.6, None]) == "10 or never"
    assert noise._range([None]) == "never"
