"""Rows of measurements beside those they are compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from experiments.presets import REFERENCE
from experiments.scaling_gpus.tasks import STRONG

_GIB = 2**30
Row = Mapping[str, Any]


def compared(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what a row is over the others that are there.

    Args:
      row: one that was measured.
      rows: that were measured before.

    Returns:
      efficiency: tokens/s of a device, over those of the one device alone. In strong
        scaling that one had as many rows as all of these together.
      overhead: time over that of the reference policy, on the same mesh.
    """
    found = {}
    alone = _find(rows, row, devices=1, mesh="data=1", scaling="weak")
    if alone is not None:
        speed = row["tokens_per_second"] / row["devices"]
        found["efficiency"] = speed / alone["tokens_per_second"]
    plain = _find(rows, row, case=REFERENCE)
    if plain is not None:
        found["overhead"] = best(row) / best(plain)
    return found


def _find(rows: Sequence[Row], row: Row, **changes: Any) -> Row | None:
    """Returns the measured row that differs from another by these fields alone."""
    keys = ("model", "case", "mesh", "scaling", "devices")
    wanted = {key: row[key] for key in keys} | changes
    for other in (*rows, row):
        if "milliseconds" in other and all(other[k] == v for k, v in wanted.items()):
            return other
    return None


def best(row: Row) -> float:
    """Returns the milliseconds of a step."""
    return min(row["milliseconds"])


def table(rows: Sequence[Row]) -> Table:
    """Returns the rows as people read them."""
    columns = ("model", "case", "mesh", "scaling", "ms", "again", "tokens/s", "MFU")
    more = ("efficiency", "over bf16", "comm.", "exposed", "sent GiB", "device GiB")
    table = Table(*columns, *more)
    for row in rows:
        names = [str(row[key]) for key in ("model", "case", "mesh", "scaling")]
        if "error" in row:
            table.add_row(*names, row["error"])
            continue
        sent = sum(row["collective_bytes"].values()) / _GIB
        table.add_row(
            *names,
            *(f"{ms:.1f}" for ms in row["milliseconds"]),
            f"{row['tokens_per_second']:,.0f}",
            _percent(row["utilization"]),
            f"{row['efficiency']:.3f}" if "efficiency" in row else "",
            f"{row['overhead']:.3f}" if "overhead" in row else "",
            _percent(row["communication_share"]),
            _percent(row["exposed_share"]),
            f"{sent:.2f}",
            "" if row["device_bytes"] is None else f"{row['device_bytes'] / _GIB:.1f}",
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def verdicts(rows: Sequence[Row], *, least: float = 0.90, most: float = 0.03) -> str:
    """Returns how the rows stand to what is asked of them, a line each.

    Args:
      rows: compared ones.
      least: efficiency of weak scaling over fsdp.
      most: by which the overhead of a policy may grow from one device to all.
    """
    lines = []
    for row in rows:
        if row["devices"] == 1 or row["scaling"] == STRONG or "error" in row:
            continue
        name = f"{row['model']} {row['case']} {row['mesh']}"
        if row["mesh"] == f"fsdp={row['devices']}" and "efficiency" in row:
            is_met = row["efficiency"] >= least
            lines.append(f"{name}: efficiency {row['efficiency']:.3f}, {_word(is_met)}")
        alone = _find(rows, row, devices=1, mesh="data=1", scaling="weak")
        if row["case"] != REFERENCE and alone is not None and "overhead" in row:
            grown = row["overhead"] - alone.get("overhead", row["overhead"])
            lines.append(f"{name}: overhead {grown:+.3f}, {_word(grown <= most)}")
    return "\n".join(lines)


def _word(is_met: bool) -> str:
    return "met" if is_met else "missed"
