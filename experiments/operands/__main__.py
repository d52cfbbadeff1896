"""Measures what 4-bit grids make of the operands of a model in training.

    python -m experiments.operands
    python -m experiments.operands --show

Trains a model in BF16 unless the run is there, captures three of its steps, and adds
what is missing to results.jsonl. Started again it goes on where it was stopped. Then it
writes the tables of the README and the figures.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from experiments import terminal
from experiments.folder import Row
from experiments.operands import cases, command, measure, show
from experiments.operands.captures import Source, train
from experiments.operands.command import Arguments, Study
from experiments.operands.tiles import Tiles
from experiments.study import Results


def measure_all(source: Source, results: Results, tiny: bool) -> None:
    """Adds the rows that are missing."""
    train(source)
    found = functools.lru_cache(maxsize=1)(
        functools.partial(command.same, source, results)
    )
    tiles = functools.lru_cache(maxsize=1)(lambda step: Tiles(found(step)))
    for piece in results.missing(pieces(source, tiny=tiny)):
        step = piece["step"]
        if piece["section"] == "captures":
            row = {"loss": found(step).loss, "layers": list(found(step).layers)}
        else:
            row = {"figures": figures(tiles(step), piece)}
        results.add(piece | row)
        print(*piece.values(), flush=True)


def figures(tiles: Tiles, piece: Row) -> measure.Figures:
    """Returns what is measured of a step under the quantizer that a piece names."""
    quantizer = cases.quantizer(piece)
    if piece["section"] == "distributions":
        return measure.distributions(tiles, quantizer)
    return measure.measure(tiles, quantizer)


def pieces(source: Source, *, tiny: bool) -> Iterator[Row]:
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
    measure=measure_all,
    draw=show.draw,
    parts=show.parts,
)


def main(arguments: OmitArgPrefixes[Arguments]) -> None:
    """Measures what is missing, and shows all."""
    command.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(terminal.command(main))
