"""The results of experiments.evaluate as a table, with their gaps to BF16."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.presets import REFERENCE
from experiments.report import tables
from experiments.report.curves import percent_over

_CAPTION = (
    "Losses in nats/token. Forward: whether its GEMMs were quantized as in the last "
    "step of training, or in BF16. The gap is to the model trained in BF16, of the "
    "same seed and step: positive is worse."
)

_LOSSES = ("domain", "held-out loss", "bits/byte", "gap to BF16")
_CHOICES = ("accuracy", "by byte")

Row = Mapping[str, Any]


def with_gaps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns results whose domains have a gap too; None without a BF16 run.

    gap = 100 (heldout_loss / heldout_loss of BF16 - 1), of equal seed, step and domain
    """
    references = {
        (row["seed"], row["step"], domain): each["heldout_loss"]
        for row in rows
        if row["policy"] == REFERENCE
        for domain, each in row.get("domains", {}).items()
    }

    def domains(row: Row) -> dict[str, Any]:
        found = {}
        for domain, each in row["domains"].items():
            reference = references.get((row["seed"], row["step"], domain))
            loss, gap = each["heldout_loss"], None
            if loss is not None and reference is not None:  # null stands for NaN
                gap = percent_over(loss, reference)
            found[domain] = {**each, "gap": gap}
        return found

    return [
        {**row, "domains": domains(row)} if "domains" in row else dict(row)
        for row in rows
    ]


def table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns header and cells of results; a line for each domain of each."""
    has_losses = any("domains" in row for row in rows)
    has_choices = any("choices" in row for row in rows)
    header = (
        *("", "step", "forward"),
        *(_LOSSES if has_losses else ()),
        *(_CHOICES if has_choices else ()),
    )
    lines: list[tuple[str, ...]] = []
    for row in rows:
        name = (f"{row['policy']}, seed {row['seed']}", f"{row['step']}")
        first, last = (*name, row["forward"]), ()
        if has_choices:
            found = row.get("choices", {})
            kinds = ("by_sum", "by_byte")
            last = tuple(f"{found[k]:.1%}" if k in found else "" for k in kinds)
        for domain, each in row.get("domains", {"": None}).items():
            middle = _losses(domain, each) if has_losses else ()
            lines.append((*first, *middle, *last))
            first, last = ("",) * len(first), ("",) * len(last)
    return header, lines


def caption(rows: Sequence[Row]) -> str:
    """Returns what the columns of the table mean, and of how much its figures are."""
    tokens: dict[str, set[int]] = {}
    for row in rows:
        for domain, each in row.get("domains", {}).items():
            tokens.setdefault(domain, set()).add(each["tokens"])
    questions = {row["choices"]["questions"] for row in rows if "choices" in row}
    sentences = [_CAPTION]
    if tokens:
        counts = (f"{domain} {_any_of(found)}" for domain, found in tokens.items())
        sentences.append(f"Held-out tokens: {'; '.join(counts)}.")
    if questions:
        sentences.append(f"Questions: {_any_of(questions)}.")
    return " ".join(sentences)


def _any_of(counts: Iterable[int]) -> str:
    return " or ".join(f"{count:,}" for count in sorted(counts))


def _losses(domain: str, found: Row | None) -> tuple[str, ...]:
    if found is None:
        return ("",) * len(_LOSSES)
    loss, bits = found["heldout_loss"], found["bits_per_byte"]
    return domain, tables.number(loss), tables.number(bits), tables.gap(found["gap"])
