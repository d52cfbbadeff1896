"""The figures: losses and their gaps to BF16, over steps or tokens."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from experiments.presets import CONTROL, REFERENCE
from experiments.report.curves import Band, percent_over, smooth
from experiments.report.runs import ALL, Group, Trial
from experiments.report.summary import Baseline, by_name, heldout
from experiments.report.summary import Trial as Result

GAP = "gap to BF16, % (positive: worse)"
_SETTLED = 0.2  # of a run: what comes before does not set the limits of the gaps
_STYLES = ("--", ":")  # of the n-grams


def plot(trials: Sequence[Result], baselines: Sequence[Baseline], path: Path) -> None:
    """Draws the smoothed training losses and their gaps to BF16; the mean over seeds.

    Args:
      trials: of policies.
      baselines: drawn as levels of held-out loss.
      path: of the PNG file.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    curves = {
        group[0].name: np.mean([smooth(trial.losses) for trial in group], axis=0)
        for group in by_name(trials)
    }
    for name, curve in curves.items():
        steps = np.arange(1, len(curve) + 1)
        line = losses.plot(steps, curve, label=name, linewidth=1.2)[0]
        if name != REFERENCE and REFERENCE in curves:
            gap = percent_over(curve, curves[REFERENCE])
            gaps.plot(steps, gap, label=name, color=line.get_color(), linewidth=1.2)
    for group, style in zip(by_name(baselines), _STYLES, strict=False):
        level = heldout(group)["heldout_loss"]
        label = f"{group[0].name}, held out"
        losses.axhline(level, label=label, color="gray", linestyle=style, linewidth=1)
    losses.set(xlabel="step", ylabel="training loss, nats/token")
    gaps.set(xlabel="step", ylabel=GAP)
    gaps.axhline(0, color="black", linewidth=0.8)
    _finish(losses, gaps)
    figure.savefig(path, dpi=150)


def overview(group: Group) -> Figure:
    """Draws training and held-out losses against tokens, and their gaps to BF16.

    Lines are means over seeds, bands a sample standard deviation to both sides. The
    control has no gap here, as its own would hide all others.
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (losses, gaps), (heldout_losses, heldout_gaps) = figure.subplots(2, 2)
    for axes, values in (
        (losses, lambda trial: trial.smoothed),
        (heldout_losses, lambda trial: trial.heldout.get(ALL, {})),
    ):
        _draw(axes, group, values, marked=axes is heldout_losses)
    for axes, values in (
        (gaps, group.train_gap),
        (heldout_gaps, group.heldout_gap),
    ):
        _draw_gaps(axes, group, values, marked=axes is heldout_gaps)
    for row, style in zip(group.baselines, _STYLES, strict=False):
        level = {"label": row["name"], "color": "gray", "linewidth": 1}
        heldout_losses.axhline(row["heldout_loss"], linestyle=style, **level)
    losses.set(ylabel="training loss, nats/token")
    heldout_losses.set(ylabel="held-out loss, nats/token")
    gaps.set(title="training loss")
    heldout_gaps.set(title="held-out loss")
    _finish(losses, gaps, heldout_losses, heldout_gaps, xlabel="tokens seen")
    return figure


def of_domains(group: Group) -> Figure | None:
    """Draws the gap of the held-out loss of every domain; None of a single one."""
    domains = [name for name in group.domains if name != ALL]
    if not domains:
        return None
    columns = min(3, len(domains))
    rows = -(-len(domains) // columns)
    figure = Figure(figsize=(3.8 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, domain in zip(panels, domains, strict=False):
        values = lambda trial, domain=domain: group.heldout_gap(trial, domain)
        _draw_gaps(axes, group, values, marked=True)
        axes.set(title=domain)
    for axes in panels[len(domains) :]:
        axes.set_visible(False)
    _finish(*panels[: len(domains)], xlabel="tokens seen")
    return figure


Values = Callable[[Trial], Mapping[int, float]]


def _draw(axes: Axes, group: Group, values: Values, *, marked: bool) -> list[Band]:
    """Draws the band of every policy, in a color of its own in all panels."""
    bands = []
    for number, (policy, trials) in enumerate(group.policies.items()):
        seeds = [_series(trial, values(trial)) for trial in trials]
        seeds = [(tokens, found) for tokens, found in seeds if len(tokens)]
        if not seeds:
            continue
        band, color = Band.of(seeds), f"C{number % 10}"
        marker = "." if marked else None
        axes.plot(
            band.tokens, band.mean, label=policy, color=color, lw=1.2, marker=marker
        )
        edges = (band.mean - band.spread, band.mean + band.spread)
        axes.fill_between(band.tokens, *edges, color=color, alpha=0.2, linewidth=0)
        bands.append(band)
    return bands


def _draw_gaps(axes: Axes, group: Group, values: Values, *, marked: bool) -> None:
    """Draws the gaps of all policies but the reference and the control."""

    def shown(trial: Trial) -> Mapping[int, float]:
        return {} if trial.policy in (REFERENCE, CONTROL) else values(trial)

    bands = _draw(axes, group, shown, marked=marked)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylabel=GAP)
    late = [0.0]
    for band in bands:
        spread = np.nan_to_num(band.spread)
        settled = band.tokens >= _SETTLED * band.tokens[-1]
        edges = np.concatenate([band.mean - spread, band.mean + spread])
        chosen = edges[np.tile(settled, 2)]
        late += chosen[np.isfinite(chosen)].tolist()
    low, high = min(late), max(late)
    if high > low:
        margin = 0.1 * (high - low)
        axes.set_ylim(low - margin, high + margin)


def _series(trial: Trial, values: Mapping[int, float]):
    steps = np.array(list(values), np.float64)
    return steps * trial.tokens_per_step, np.array(list(values.values()))


def _finish(*panels: Axes, xlabel: str | None = None) -> None:
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        if xlabel is not None:
            axes.set_xlabel(xlabel)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20M
