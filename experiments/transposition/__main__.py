"""Measures what it costs that 1-D blocks change with the transpose, and 2-D ones not.

python -m experiments.transposition --run runs/operands

Takes the run and the captures of experiments.operands, which it makes unless they are
there, and adds what is missing to results.jsonl. Started again it goes on where it was
stopped.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import tyro

from experiments.folder import Row
from experiments.operands.captures import TINY, Source, capture, train
from experiments.operands.tiles import Tiles
from experiments.study import Results
from experiments.transposition import measure

FOLDER = Path(__file__).parent


def main(
    *, run: Path = Path("runs/operands"), out: Path = FOLDER, tiny: bool = False
) -> None:
    """Measures what is missing.

    Args:
      run: Folder of the training run and of the captures.
      out: Folder of results.jsonl.
      tiny: A very small model, few steps and quantizers: seconds.
    """
    source = dataclasses.replace(TINY if tiny else Source(folder=run), folder=run)
    results = Results(out / "results.jsonl")
    train(source)
    tiles = functools.lru_cache(maxsize=1)(lambda step: Tiles(capture(source, step)))
    for piece in results.missing(pieces(source, tiny=tiny)):
        figures = measure.measure(tiles(piece["step"]), measure.quantizer(piece))
        results.add(piece | figures)
        print(*piece.values(), flush=True)


def pieces(source: Source, *, tiny: bool) -> Iterator[Row]:
    """Yields what is measured, a step after the other."""
    chosen = list(measure.cases())[:2] if tiny else list(measure.cases())
    for step in source.steps:
        for case in chosen:
            yield {"model": source.model, "seed": 0, "step": step} | case


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
