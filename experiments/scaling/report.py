"""Tables and the figure of losses over compute."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments import study
from experiments.folder import Row
from experiments.many_runs.found import loss
from experiments.many_runs.gaps import Difference, differences
from experiments.many_runs.gaps import gaps as by_policy
from experiments.many_runs.show import NOT_RUN, gap
from experiments.presets import REFERENCE
from experiments.report import tables
from experiments.report.summary import mean_and_spread
from experiments.scaling import fit
from experiments.scaling.fit import Interval, Point

_PAIR = ("ufp4", "e2m1_ref")  # whose ranking the papers claim


def losses(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Returns the losses of each policy over FLOPs, of what did not diverge."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        if math.isfinite(value := loss(row)):
            found.setdefault(row["policy"], []).append(Point(row["flops"], value))
    return found


def gaps(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Returns the gaps of each policy to BF16, in percent, of what did not diverge."""
    found: dict[str, list[Point]] = {}
    for group in _by_model(rows):
        for each in by_policy(group):
            for value in filter(math.isfinite, each.gaps):
                if each.policy != REFERENCE:
                    point = Point(_flops(group), value)
                    found.setdefault(each.policy, []).append(point)
    return found


def _by_model(rows: Sequence[Row]) -> list[list[Row]]:
    models = dict.fromkeys(row["model"] for row in rows)
    return [[row for row in rows if row["model"] == model] for model in models]


def sizes(by_model: Mapping[str, Sequence[Row]]) -> str:
    """Returns a line for each model: losses and gaps."""
    lines: list[tables.Cells] = []
    for model, rows in by_model.items():
        found = {each.policy: each for each in by_policy(rows)}
        if REFERENCE not in found:
            lines.append((f"`{model}`", *5 * ("",)))
            continue
        about = (f"{rows[0]['params'] / 1e6:.1f}", f"{_flops(rows):.2g}")
        of_bf16 = tables.number(*mean_and_spread(found[REFERENCE].losses))
        of_pair = (gap(found[p].gaps) if p in found else "" for p in reversed(_PAIR))
        lines.append((f"`{model}`", *about, of_bf16, *of_pair))
    header = ("model", "M parameters", "FLOPs", "BF16", *reversed(_PAIR))
    return tables.markdown(header, lines)


def _flops(rows: Sequence[Row]) -> float:
    """Returns the FLOPs of the runs of a model; one that diverged has fewer."""
    return max(row["flops"] for row in rows)


def laws(rows: Sequence[Row]) -> str:
    """Returns E, a and b of every policy, with 95% intervals."""
    lines = []
    for policy, points in losses(rows).items():
        if len({point.flops for point in points}) < 3:
            continue
        found = fit.intervals(fit.law, points, noise=fit.deviation(points))
        lines.append((f"`{policy}`", *map(_interval, found)))
    if not lines:
        return f"{NOT_RUN} A fit needs three sizes."
    return tables.markdown(("policy", "E", "a", "b"), lines)


def trend(rows: Sequence[Row]) -> str:
    """Returns how gaps change with compute, and what it takes to rank the pair."""
    found = gaps(rows)
    lines = []
    for policy, points in found.items():
        if len({point.flops for point in points}) < 2:
            continue
        noise = fit.deviation(points)
        slope = fit.intervals(lambda moved: [fit.slope(moved)], points, noise=noise)
        lines.append((f"`{policy}`", *map(_interval, slope)))
    if not lines:
        return f"{NOT_RUN} A trend needs two sizes."
    table = tables.markdown(("policy", "points a tenfold compute"), lines)
    return f"{table}\n\n{_needed(found)}\n\n{_ranked(rows)}"


def _ranked(rows: Sequence[Row]) -> str:
    """Returns a sentence: what all sizes and seeds together say of the pair."""
    pairs: list[float] = []
    for group in _by_model(rows):
        found = {each.policy: each for each in by_policy(group)}
        if found.keys() >= set(_PAIR):
            pairs += differences(*(found[policy] for policy in _PAIR))
    pairs = [pair for pair in pairs if math.isfinite(pair)]
    if len(pairs) < 2:
        return "There are no two pairs of runs of both recipes yet."
    ahead = sum(pair < 0 for pair in pairs)
    return (
        f"In {ahead} of {len(pairs)} pairs of one size and seed `{_PAIR[0]}` is ahead "
        f"of `{_PAIR[1]}`. The mean of the differences of gaps, in points, with its "
        f"95% interval: {Difference.of(pairs)}."
    )


def _needed(found: Mapping[str, Sequence[Point]]) -> str:
    """Returns a sentence: the seeds that would rank the pair at the largest compute."""
    pair = [found.get(policy, ()) for policy in _PAIR]
    shared = {point.flops for point in pair[0]} & {point.flops for point in pair[1]}
    if not shared:
        return "The two recipes have no size in common yet."
    largest = max(shared)
    means = [np.mean([p.value for p in ps if p.flops == largest]) for ps in pair]
    difference = float(means[0] - means[1])
    noises = [s.value for ps in pair if (s := fit.deviation(ps)) is not None]
    noise = float(np.sqrt(np.mean(np.square(noises)))) if noises else None
    needed = fit.seeds_needed(difference, noise)
    found_so_far = (
        f"At {largest:.2g} FLOPs the gap of `{_PAIR[0]}` less that of `{_PAIR[1]}` is "
        f"{difference:+.2f} points"
    )
    if needed is None:
        return f"{found_so_far}; how far seeds spread is not known yet."
    return (
        f"{found_so_far}; a gap's standard deviation over seeds is {noise:.2f}. Were "
        f"that the true difference, {needed} seeds of each would make it two standard "
        "errors."
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws losses with their laws, and gaps, over FLOPs, into a PNG file."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, points in losses(rows).items():
        flops, values = zip(*points, strict=True)
        line = left.plot(flops, values, "o", label=policy, ms=4)[0]
        if len(set(flops)) >= 3:
            x = np.geomspace(min(flops), max(flops), 50)
            left.plot(x, fit.law(points)(x), color=line.get_color(), lw=1)
    for policy, points in gaps(rows).items():
        right.plot(*zip(*points, strict=True), "o", label=policy, ms=4)
    left.set(xlabel="FLOPs", ylabel="held-out loss, nats/token", xscale="log")
    right.set(xlabel="FLOPs", ylabel="gap to BF16, % (positive: worse)", xscale="log")
    right.axhline(0, color="black", lw=0.8)
    study.save(figure, path, left, right)


def _interval(found: Interval) -> str:
    if np.isnan(found.low):
        return f"{found.value:.3g}"
    return f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"
