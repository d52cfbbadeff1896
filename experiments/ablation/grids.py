"""The gap of both grids under each scope of the rotation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.figure import Figure

from experiments import study
from experiments.folder import Row
from experiments.many_runs import show
from experiments.many_runs.gaps import difference, gaps
from experiments.report import tables

# By the GEMMs that are rotated: the policies of E2M1 and of the uniform grid.
SCOPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "none": ("e2m1_no_rht", "ufp4_no_rht"),
        "wgrad": ("e2m1_ref", "ufp4_rht_wgrad"),
        "fprop, dgrad, wgrad": ("e2m1_rht", "ufp4"),
    }
)
_GRIDS = ("E2M1", "uniform")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws gaps over scopes: dots, joined for each seed, and their means as a line."""
    found = {each.policy: each for each in gaps(rows)}
    if not found:
        return
    figure = Figure(figsize=(5.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for i, policies in enumerate(zip(*SCOPES.values(), strict=True)):
        known = [(x, found[p]) for x, p in enumerate(policies) if p in found]
        means = [each.mean for _, each in known]
        axes.plot([x for x, _ in known], means, f"C{i}", lw=2.5, label=_GRIDS[i])
        for seed in sorted({seed for _, each in known for seed in each.seeds}):
            of_seed = [(x, g) for x, each in known if (g := each.of(seed)) is not None]
            axes.plot(*zip(*of_seed, strict=True), f"C{i}o-", ms=4, lw=0.6, alpha=0.6)
    axes.set_xticks(range(len(SCOPES)), list(SCOPES))
    axes.set(xlabel="GEMMs of rotated operands", ylabel="gap to BF16, %")
    axes.margins(x=0.2)
    study.save(figure, path, axes)


def table(rows: Sequence[Row]) -> str:
    """Returns a line for each scope, and what all cost over wgrad alone."""
    found = {each.policy: each for each in gaps(rows)}
    if not found:
        return show.NOT_RUN

    def gap(policy: str) -> str:
        return show.gap(found[policy].gaps) if policy in found else ""

    def less(policy: str, other: str) -> str:
        if not found.keys() >= {policy, other}:
            return ""
        return str(difference(found[policy], found[other], None) or "not known")

    lines = [
        (scope, gap(e2m1), gap(uniform), less(uniform, e2m1))
        for scope, (e2m1, uniform) in SCOPES.items()
    ]
    _, wgrad, everywhere = SCOPES.values()
    e2m1, uniform = (less(*pair) for pair in zip(everywhere, wgrad, strict=True))
    lines.append(("all three less wgrad alone", e2m1, uniform, ""))
    return tables.markdown(("rotated", *_GRIDS, "uniform less E2M1"), lines)
