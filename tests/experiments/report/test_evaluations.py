"""Results of evaluated models beside those of BF16."""

import pytest

from experiments.report import evaluations


def result(policy, loss, *, seed=0, step=4, forward="bf16", **more):
    domains = {
        "text": {"heldout_loss": loss, "bits_per_byte": loss / 2, "tokens": 1200}
    }
    names = {"policy": policy, "seed": seed, "step": step, "forward": forward}
    return names | {"domains": domains} | more


def test_gaps_are_to_bf16_of_the_same_seed_and_step():
    rows = [
        result("bf16", 2.0),
        result("bf16", 4.0, seed=1),
        result("ufp4", 2.1, forward="quantized"),
        result("ufp4", 4.4, seed=1),
        result("ufp4", 4.4, seed=1, step=8),
    ]
    found = [r["domains"]["text"]["gap"] for r in evaluations.with_gaps(rows)]
    assert found[:4] == pytest.approx([0, 0, 5, 10]) and found[4] is None


def test_a_table_has_a_line_for_each_domain_and_the_columns_there_are():
    row = result("ufp4", 2.0, choices={"by_sum": 0.25, "by_byte": 0.5})
    row["domains"]["code"] = {"heldout_loss": 1.0, "bits_per_byte": 0.5}
    header, lines = evaluations.table(evaluations.with_gaps([row]))
    assert header[3:] == (*evaluations._LOSSES, "accuracy", "by byte")
    first, second = lines
    assert first[:4] == ("ufp4, seed 0", "4", "bf16", "text")
    assert first[4:] == ("2.0000", "1.0000", "", "25.0%", "50.0%")
    assert second == ("", "", "", "code", "1.0000", "0.5000", "", "", "")


def test_without_losses_there_are_accuracies():
    row = result("ufp4", 2.0, choices={"by_sum": 1.0, "by_byte": 0.0})
    del row["domains"]
    header, lines = evaluations.table(evaluations.with_gaps([row]))
    assert header == ("", "step", "forward", "accuracy", "by byte")
    assert lines == [("ufp4, seed 0", "4", "bf16", "100.0%", "0.0%")]


def test_a_caption_says_of_how_much_the_figures_are():
    first = result("ufp4", 2.0, choices={"questions": 40})
    first["domains"]["code"] = first["domains"]["text"] | {"tokens": 200}
    rows = [first, result("bf16", 2.0, choices={"questions": 9})]
    sizes = "Held-out tokens: text 1,200; code 200. Questions: 9 or 40."
    assert evaluations.caption(rows).endswith(sizes)
