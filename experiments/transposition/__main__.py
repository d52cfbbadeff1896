"""Measures what it costs that 1-D blocks change with the transpose, and 2-D ones not.

    python -m experiments.transposition
    python -m experiments.transposition --show-only

Takes the run and the captures of experiments.operands, which it makes unless they are
there, and adds what is missing to results.jsonl. Started again it goes on where it was
stopped. Then it writes the tables of the README and the figure.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from experiments import terminal
from experiments.folder import Row
from experiments.operands.captures import Source, capture, train
from experiments.operands.tiles import Tiles
from experiments.study import Results
from experiments.transposition import measure, show

FOLDER = Path(__file__).parent


def main(
    *,
    run: Path | None = None,
    out: Path | None = None,
    tiny: bool = False,
    show_only: bool = False,
) -> None:
    """Measures what is missing, and shows all.

    Args:
      run: Folder of the training run and of the captures; by default runs/operands.
      out: Folder of results.jsonl, of the figure and, where there is one, of README.md;
        by default that of this study.
      tiny: A very small model, few steps and quantizers, half a minute; by default in
        runs/operands-tiny.
      show_only: Measures nothing.
    """
    source = Source.of(run, tiny=tiny)
    out = out or (source.folder / FOLDER.name if tiny else FOLDER)
    results = Results(out / "results.jsonl")
    if not show_only:
        measure_all(source, results, tiny=tiny)
    show.write(results, out)


def measure_all(source: Source, results: Results, *, tiny: bool) -> None:
    """Adds the rows that are missing."""
    train(source)
    tiles = functools.lru_cache(maxsize=1)(lambda step: Tiles(capture(source, step)))
    for piece in results.missing(pieces(source, tiny=tiny)):
        figures = measure.measure(tiles(piece["step"]), measure.quantizer(piece))
        results.add(piece | figures)
        print(*piece.values(), flush=True)


def pieces(source: Source, *, tiny: bool) -> Iterator[Row]:
    """Yields what is measured, a step after the other; of the last one all blocks."""
    for step in source.steps:
        few = tiny or step != source.steps[-1]
        blocks = (32,) if few else measure.BLOCKS
        for case in measure.cases(blocks):
            yield {"model": source.model, "seed": 0, "step": step} | case


if __name__ == "__main__":
    sys.exit(terminal.command(main))
