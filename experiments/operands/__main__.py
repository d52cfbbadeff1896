"""Measures what 4-bit grids make of the operands of a model in training.

    python -m experiments.operands
    python -m experiments.operands --show

Trains a model in BF16 unless the run is there, captures three of its steps, and adds
what is missing to results.jsonl. Started again it goes on where it was stopped. Then it
writes the tables of the README and the figures.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from experiments import terminal
from experiments.folder import Row
from experiments.operands import cases, command, measure, show
from experiments.operands.captures import Source
from experiments.operands.command import Arguments, Study
from experiments.operands.tiles import Tiles


def of_piece(tiles: Tiles, piece: Row) -> Row:
    """Returns what is measured of a step, under the quantizer that a piece names."""
    if piece["section"] == "captures":
        return {"loss": tiles.capture.loss, "layers": list(tiles.layers)}
    of = {"distributions": measure.distributions, "quantizers": measure.measure}
    return {"figures": of[piece["section"]](tiles, cases.quantizer(piece))}


def pieces(source: Source, tiny: bool) -> Iterator[Row]:
    """Yields what is measured, a step after the other; of the last one it is more."""
    for step in source.steps:
        few = tiny or step != source.steps[-1]
        chosen = list(cases.few_cases() if few else cases.main_cases())
        yield {
            "section": "captures",
            "step": step,
            "model": source.model,
            "seed": 0,
            "tokens": source.tokens,
        }
        for rotation in sorted({case["rotation"] for case in chosen}):
            case = cases.case("UNIFORM", rotation)
            yield {"section": "distributions", "step": step} | case
        for case in chosen:
            yield {"section": "quantizers", "step": step} | case
    for case in () if tiny else cases.more_cases():
        yield {"section": "quantizers", "step": source.steps[-1]} | case


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
