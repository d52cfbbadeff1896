"""The gap of both grids under each scope of the rotation."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

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
    changes = (less(*pair) for pair in zip(everywhere, wgrad, strict=True))
    lines.append(("all three less wgrad alone", *changes, ""))
    return tables.markdown(("rotated", "E2M1", "uniform", "uniform less E2M1"), lines)
