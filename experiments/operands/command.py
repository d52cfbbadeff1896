"""The command of a study of captured operands."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from experiments import study
from experiments.folder import Row
from experiments.operands.captures import Capture, Source, capture, train
from experiments.operands.tiles import Tiles
from experiments.study import Results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is measured of the operands, and how it is shown.

    Attributes:
      folder: holds README.md and results.jsonl.
      pieces: yields what is measured of a source, tiny or not, a step after the other.
      measure: returns what the row of a piece has to say of the tiles of its step.
      draw: draws figures of rows into a folder.
      parts: returns the tables of the README by name.
    """

    folder: Path
    pieces: Callable[[Source, bool], Iterable[Row]]
    measure: Callable[[Tiles, Row], Row]
    draw: Callable[[Sequence[Row], Path], None]
    parts: Callable[[Sequence[Row]], Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measures what is missing, and shows all."""

    run: Path | None = None
    """folder of the training run and of the captures; by default runs/operands."""
    out: Path | None = None
    """folder of results.jsonl, of figures and, where there is one, of README.md; by
    default that of the study."""
    tiny: bool = False
    """a very small model, few steps and quantizers, half a minute; by default in
    runs/operands-tiny."""
    show: bool = False
    """only makes tables and figures anew of the rows that are there."""


def measure_all(about: Study, source: Source, results: Results, *, tiny: bool) -> None:
    """Adds the rows that are missing.

    Raises:
      ValueError: those that are there are of another run.
    """
    train(source)

    @functools.lru_cache(maxsize=1)
    def tiles(step: int) -> Tiles:
        return Tiles(same(source, results, step))

    for piece in results.missing(about.pieces(source, tiny)):
        results.add(piece | about.measure(tiles(piece["step"]), piece))
        print(*piece.values(), flush=True)


def same(source: Source, results: Results, step: int) -> Capture:
    """Returns a capture, of which the rows of its step must be: their loss says so.

    Raises:
      ValueError: they are of another run.
    """
    found = capture(source, step)
    for row in results.find(step=step):
        if row.get("loss", found.loss) != found.loss:
            raise ValueError(
                f"--out: rows must be of the run in {str(source.folder)!r}, whose loss "
                f"at step {step} is {found.loss}, got rows of {row['loss']}. Use "
                "another --out."
            )
    return found


def main(about: Study, arguments: Arguments) -> None:
    """Runs the command.

    Raises:
      ValueError: there is nothing to show, or as of `measure_all`.
    """
    source = Source.of(arguments.run, tiny=arguments.tiny)
    own = source.folder / about.folder.name if arguments.tiny else about.folder
    out = arguments.out or own
    results = Results(out / "results.jsonl")
    if not arguments.show:
        measure_all(about, source, results, tiny=arguments.tiny)
    if not results.rows:
        raise ValueError(
            f"--show: {results.path} must have rows, got none. Measure first, "
            "without --show."
        )
    rows = _once(results.rows)
    about.draw(rows, out)
    parts = about.parts(rows)
    if (readme := out / "README.md").exists():
        study.show(readme, parts)
    print("\n\n".join(parts.values()))


def _once(rows: Sequence[Row]) -> list[Row]:
    """Returns rows without those that a second command measured at the same time."""
    stamp = ("git", "jax", "device")
    found: list[tuple[Row, Row]] = []
    for row in rows:
        measured = {name: value for name, value in row.items() if name not in stamp}
        if all(measured != other for other, _ in found):
            found.append((measured, row))
    return [row for _, row in found]
