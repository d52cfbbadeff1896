"""Tables of runs for the pages of studies."""

from collections.abc import Iterable, Sequence

from experiments.folder import Row
from experiments.many_runs import budget
from experiments.many_runs.found import Found, loss
from experiments.many_runs.gaps import Gap, difference, gaps, spread
from experiments.many_runs.run import Run
from experiments.many_runs.tuning import MOST, RATES, tuned, tuning
from experiments.presets import REFERENCE
from experiments.report import tables
from experiments.report.summary import mean_and_spread

NOT_RUN = "Not run yet."


def of_gaps(rows: Sequence[Row], base: str) -> str:
    """Returns a line for each policy: losses, gaps, and how it compares with one."""
    found = gaps(rows)
    if not found:
        return NOT_RUN
    deviation = spread(found)
    bases = [each for each in found if each.policy == base]
    header = ("policy", "seeds", "held-out loss", "gap", f"less that of `{base}`")
    header += ("gap, FP4 forward", "M tokens/s", "diverged")

    def cells(each: Gap) -> tuple[str, ...]:
        against = ""
        if bases and each.policy not in (base, REFERENCE):
            against = str(difference(each, bases[0], deviation) or "not known")
        return (
            f"`{each.policy}`",
            str(len(each.losses)),
            tables.number(*mean_and_spread(each.losses)),
            gap(each.gaps) if each.policy != REFERENCE else "",
            against,
            gap(each.own_gaps) if each.policy != REFERENCE else "",
            f"{each.tokens_per_s / 1e6:.2f}",
            str(each.diverged),
        )

    lines = tables.markdown(header, [cells(each) for each in found])
    if not any(len(each.gaps) == 1 for each in found if each.policy != REFERENCE):
        return lines  # nothing takes the deviation of others
    known = "not known" if deviation is None else f"{deviation.value:.2f} points"
    return f"{lines}\n\nStandard deviation of a gap over seeds, pooled: {known}."


def of_domains(rows: Sequence[Row]) -> str:
    """Returns the gap of each policy on each domain of the held-out text."""
    if not rows:
        return NOT_RUN
    domains = [name for name in rows[0]["heldout"]["bf16"] if name != "all"]
    columns = [{each.policy: each for each in gaps(rows, name)} for name in domains]
    policies = [policy for policy in columns[0] if policy != REFERENCE]
    lines = [
        (f"`{policy}`", *(gap(column[policy].gaps) for column in columns))
        for policy in policies
    ]
    return tables.markdown(("gap", *domains), lines)


def of_rates(found: Found, models: Iterable[str]) -> str:
    """Returns the held-out loss of BF16 at every learning rate that was tried."""
    lines, ends = [], []
    by_model = {model: tuning(found, model) for model in models}
    tried = sorted({run.lr for runs in by_model.values() for run in runs})
    for model, runs in by_model.items():
        losses = {row["lr"]: loss(row) for row in found.rows_of(runs)}
        cells = (tables.number(losses.get(rate)) for rate in tried)
        lines.append((f"`{model}`", f"{runs[0].tokens / 1e6:.0f}", *cells))
        if (best := tuned(found, model)) and best.lr in (RATES[0], MOST):
            ends.append(f"`{model}`")
    header = ("model", "M tokens", *(f"{rate:g}" for rate in tried))
    table = tables.markdown(header, lines)
    if not ends:
        return table
    return f"{table}\n\nAt an end of the rates that were tried: {', '.join(ends)}."


def of_budget(runs: Sequence[Run], found: Found) -> str:
    """Returns what was run, what was not, and the minutes of both, by model."""
    lines = [
        (f"`{model}`", str(done), f"{spent:.1f}", str(left), f"{cost:.0f}")
        for model, done, spent, left, cost in budget.by_model(runs, found)
    ]
    header = ("model", "done", "minutes", "not run", "minutes expected")
    return tables.markdown(header, lines)


def gap(values: Sequence[float]) -> str:
    """Returns the mean of gaps and their deviation; nothing for none."""
    return tables.gap(*mean_and_spread(values)) if values else ""
