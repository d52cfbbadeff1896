"""Which blocks of a model repeat, so that a scan compiles them once."""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """A unit of blocks that is repeated.

    Attributes:
      first: index of the block where it begins.
      period: blocks of the unit.
      repeats: how often it comes, at least once.
    """

    first: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        """Index of the block after it."""
        return self.first + self.period * self.repeats

    @property
    def places(self) -> tuple[range, ...]:
        """For each block of the unit, the indices of its repetitions."""
        firsts = range(self.first, self.first + self.period)
        return tuple(range(first, self.end, self.period) for first in firsts)


def find_runs(blocks: Sequence[Hashable]) -> tuple[Run, ...]:
    """Returns the runs that make up a sequence, with the fewest blocks to compile.

    Of several such, those that begin with the longest run.

    Args:
      blocks: equal values stand for equal blocks.

    Example:
      >>> find_runs("AAABCBC")
      (Run(first=0, period=1, repeats=3), Run(first=3, period=2, repeats=2))
    """
    # From every block on: how many are compiled, and the runs.
    best: dict[int, tuple[int, tuple[Run, ...]]] = {len(blocks): (0, ())}
    for first in reversed(range(len(blocks))):
        choices = (
            (run.period + best[run.end][0], (run, *best[run.end][1]))
            for run in _runs_from(blocks, first)
        )
        best[first] = min(choices, key=lambda choice: (choice[0], -choice[1][0].end))
    return best[0][1]


def _runs_from(blocks: Sequence[Hashable], first: int) -> Iterator[Run]:
    """Yields every run that begins at a block; units of several blocks are repeated."""
    for period in range(1, len(blocks) - first + 1):
        unit, run = blocks[first : first + period], Run(first, period, 1)
        while blocks[run.end : run.end + period] == unit:
            run = run._replace(repeats=run.repeats + 1)
        least = min(period, 2)
        yield from (run._replace(repeats=n) for n in range(least, run.repeats + 1))
