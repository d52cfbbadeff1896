"""A plan as a table: what a device needs and does, and what each row of it means."""

from collections import Counter

from rich.table import Table

from experiments.devices import Device
from experiments.estimate import ATTENTION, GEMMS, LINKS, MEMORY, Estimate
from experiments.footprint import Footprint

GIB = 2**30
_TAKEN = 0.75  # of the memory of a GPU, by JAX unless told otherwise
_LESS = "use more devices, more --microbatches, or --set model.remat=full"

Row = tuple[str, str, str]  # what, how much, its meaning


def bill(
    footprint: Footprint,
    seconds: Estimate,
    *,
    kind: Device,
    devices: int,
    tokens: int,
    flops: float,
) -> Table:
    """Returns the table of a plan.

    Args:
      footprint: of each device.
      seconds: of its step.
      kind: what the devices are.
      devices: how many.
      tokens: of a batch.
      flops: of the model in a step, on all devices.
    """
    table = Table(title=f"{devices} x {kind.kind}, each of them")
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    table.add_column("meaning")
    for row in (
        *_sizes(footprint),
        fit(footprint, kind),
        *_sent(footprint),
        *_times(seconds),
        *_rates(seconds, kind=kind, devices=devices, tokens=tokens, flops=flops),
    ):
        table.add_row(*row)
    return table


def fit(footprint: Footprint, kind: Device) -> Row:
    """Returns whether a step fits in the memory of a device."""
    memory = kind.memory * GIB
    what = f"fits in {kind.memory:.0f} GiB"
    if footprint.least > memory:
        return what, "no", f"no program does; {_LESS}"
    if footprint.peak > memory:
        return what, "perhaps", f"between the two rows above; to be sure, {_LESS}"
    meaning = "the program of a CPU, which needs more, does"
    if footprint.peak > _TAKEN * memory:
        meaning += (
            f"; set XLA_PYTHON_CLIENT_MEM_FRACTION, or JAX takes {_TAKEN:.0%} of it"
        )
    return what, "yes", meaning


def _sizes(footprint: Footprint) -> list[Row]:
    rows = (
        ("parameters", footprint.params, "its part of them, in float32"),
        ("optimizer", footprint.optimizer, "its part of the moments"),
        (
            "residuals",
            footprint.residuals,
            "what the forward pass of a microbatch leaves to the backward pass",
        ),
        (
            "at least",
            footprint.least,
            "all of these and gradients, which any program holds at once",
        ),
        (
            "peak of a CPU",
            footprint.peak,
            "of a program whose products take operands in float32; a GPU's is lower",
        ),
    )
    return [(what, f"{size / GIB:.3f} GiB", meaning) for what, size, meaning in rows]


def _sent(footprint: Footprint) -> list[Row]:
    sent = Counter()
    for each in footprint.collectives:
        sent[each.kind] += each.bytes * each.times
    meaning = "bytes of its results, in a step"
    return [(kind, f"{size / GIB:.3f} GiB", meaning) for kind, size in sent.items()]


def _times(seconds: Estimate) -> list[Row]:
    at = lambda part, of: f"at {part:.0%} of the {of}"
    rows = (
        ("GEMMs", seconds.gemms, f"of layers and head, {at(GEMMS, 'peak')}"),
        ("attention", seconds.attention, f"its products, {at(ATTENTION, 'peak')}"),
        (
            "quantizers",
            seconds.quantizers,
            f"operands read and written, {at(MEMORY, 'bandwidth')}",
        ),
        ("the rest", seconds.between, "between these, and the logits, likewise"),
        ("optimizer", seconds.optimizer, "state read and written, likewise"),
        ("communication", seconds.communication, at(LINKS, "links")),
    )
    return [
        (f"time of {what}", _milliseconds(value, value), meaning)
        for what, value, meaning in rows
    ]


def _rates(
    seconds: Estimate, *, kind: Device, devices: int, tokens: int, flops: float
) -> list[Row]:
    best, worst = seconds.bounds
    peak = flops / devices / kind.flops
    speeds = _range(f"{tokens / worst:,.0f}", f"{tokens / best:,.0f}")
    parts = _range(f"{peak / worst:.1%}", f"{peak / best:.1%}")
    return [
        (
            "time of a step",
            _milliseconds(best, worst),
            "all communication hidden, or none",
        ),
        ("tokens/s", speeds, "of all devices together"),
        ("FLOPs", f"{flops / devices:.3e}", "of the model, in a step"),
        ("utilization", parts, "these over what the peak in bfloat16 does in the time"),
    ]


def _milliseconds(best: float, worst: float) -> str:
    """Returns seconds in words."""
    return f"{_range(f'{1e3 * best:,.2f}', f'{1e3 * worst:,.2f}')} ms"


def _range(low: str, high: str) -> str:
    """Returns two numbers in words, or one that both are."""
    return low if low == high else f"{low} to {high}"
