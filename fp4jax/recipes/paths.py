"""How an error lists the layers of a model: blocks as one, what was meant first."""

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence

_MOST = 16  # names in one error
_MOST_RUNS = 6  # of numbers in a name
_NUMBER = re.compile(r"0|[1-9]\d*")  # leading zeros are numbers of their own


def listed(paths: Iterable[str], *, near: str) -> str:
    """Returns the layers of a model in words, those with the nearest names first.

    Paths that differ in their numbers alone are one, with the numbers in braces.

    Args:
      paths: of all layers.
      near: a name or a pattern that is none of theirs.

    Example:
      >>> listed(["blocks/0/up", "blocks/1/up", "head", "up_2"], near="hed")
      'head, blocks/{0..1}/up, up_2'
    """
    alike: dict[tuple[str, ...], list[list[int]]] = {}
    nearness: dict[tuple[str, ...], float] = {}
    for path in paths:
        words = tuple(_NUMBER.split(path))
        if words not in alike:
            nearness[words] = difflib.SequenceMatcher(None, near, path).ratio()
        numbers = [int(number) for number in _NUMBER.findall(path)]
        alike.setdefault(words, []).append(numbers)
    names = []
    for words in sorted(alike, key=nearness.__getitem__, reverse=True):
        spans = [_span(numbers) for numbers in zip(*alike[words], strict=True)]
        name = "".join(map("".join, zip(words, [*spans, ""], strict=True)))
        names.append(name or "(the model)")
    more = len(names) - _MOST
    return (", ".join(names[:_MOST]) or "none") + (f", {more} more" if more > 0 else "")


def _span(numbers: Sequence[int]) -> str:
    """Returns the different ones of some numbers, such as "7" or "{0..3,5}"."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    # Numbers that follow one another are as far from their places.
    pairs = itertools.groupby(enumerate(distinct), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in pairs]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    if len(parts) > _MOST_RUNS:
        parts = [*parts[: _MOST_RUNS - 2], "...", parts[-1]]
    return "{" + ",".join(parts) + "}"
