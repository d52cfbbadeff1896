"""Measures what it costs that 1-D blocks change with the transpose, and 2-D ones not.

    python -m experiments.transposition
    python -m experiments.transposition --show

Takes the run and the captures of experiments.operands, which it makes unless they are
there, and adds what is missing to results.jsonl. Started again it goes on where it was
stopped. Then it writes the tables of the README and the figure.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from experiments import terminal
from experiments.folder import Row
from experiments.operands import command
from experiments.operands.captures import Source
from experiments.operands.command import Arguments, Study
from experiments.operands.tiles import Tiles
from experiments.transposition import measure, show


def of_piece(tiles: Tiles, piece: Row) -> Row:
    """Returns what is measured of a step, under the quantizer that a piece names."""
    figures = measure.measure(tiles, measure.quantizer(piece))
    return {"loss": tiles.capture.loss} | figures


def pieces(source: Source, tiny: bool) -> Iterator[Row]:
    """Yields what is measured, a step after the other; of the last one all blocks."""
    for step in source.steps:
        few = tiny or step != source.steps[-1]
        blocks = (32,) if few else measure.BLOCKS
        for case in measure.cases(blocks):
            yield {"model": source.model, "seed": 0, "step": step} | case


STUDY = Study(
    folder=Path(__file__).parent,
    pieces=pieces,
    measure=of_piece,
    draw=show.draw,
    parts=show.parts,
)


def main(arguments: OmitArgPrefixes[Arguments]) -> None:
    """Measures what is missing, and shows all."""
    command.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(terminal.command(main))
