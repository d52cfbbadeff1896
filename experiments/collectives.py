"""The collectives of a compiled program, read from its HLO."""

import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(_KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|%?([\w.-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Groups of devices: listed, or the rows of a matrix, or along axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_ROWS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=(\S+?)(?:,? |$)")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}"
)
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")  # of ids, transposed


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: as HLO calls it, such as "all-gather".
      arrays: dtype and shape of each result on one device, such as ("u8", (256, 32)).
      devices: the first of the groups that take part together; (): all.
      times: how often the program runs it, loops included.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    devices: tuple[int, ...]
    times: int

    @property
    def bytes(self) -> int:
        """Of all results on one device, each time.

        A ragged one fills as much of its result as devices send: as much as if each had
        its equal share of room for all. Where room is bounded, that is too little.
        """
        bits = sum(math.prod(shape) * _bits(dtype) for dtype, shape in self.arrays)
        is_ragged = self.kind == "ragged-all-to-all" and self.devices
        return bits // 8 // (len(self.devices) if is_ragged else 1)


def collectives(hlo: str) -> Iterator[Collective]:
    """Yields the collectives of the text of a compiled program.

    A loop whose number of turns the program does not say counts as one turn, and of the
    branches of a conditional the one that sends the most.
    """
    lines: dict[str, list[str]] = defaultdict(list)
    entry = computation = ""
    for line in hlo.splitlines():
        if begin := _COMPUTATION.match(line):
            is_entry, computation = begin.groups()
            entry = computation if is_entry else entry
        else:
            lines[computation].append(line)

    @functools.cache
    def within(name: str) -> tuple[Collective, ...]:
        return tuple(each for line in lines[name] for each in of_line(line))

    def of_line(line: str) -> Iterator[Collective]:
        if _COLLECTIVE.search(line):
            yield _parse(line)
        called = [
            within(name.strip(" %"))
            for listed, single in _CALLED.findall(line)
            for name in (listed or single).split(",")
        ]
        if " conditional(" in line:
            called = [max(called, key=_sent)]
        trips = _TRIPS.search(line) if " while(" in line else None
        turns = int(trips[1]) if trips else 1
        for each in itertools.chain(*called):
            yield dataclasses.replace(each, times=each.times * turns)

    yield from within(entry)


def _sent(found: Iterable[Collective]) -> int:
    return sum(each.bytes * each.times for each in found)


def _parse(line: str) -> Collective:
    match = _COLLECTIVE.search(line)
    assert match is not None
    result, kind, is_start = match.groups()
    arrays = tuple(
        (dtype, _numbers(sizes)) for dtype, _, sizes in _ARRAY.findall(result)
    )
    if is_start and result.startswith("("):  # the operands come first
        arrays = arrays[-1 if kind == "ragged-all-to-all" else len(arrays) // 2 :]
    return Collective(kind, arrays, _first_group(line), times=1)


def _first_group(line: str) -> tuple[int, ...]:
    if found := _LISTED.search(line):
        return _numbers(found[1])
    if found := _ROWS.search(line):
        return tuple(_ids(found[3]).reshape(int(found[1]), -1)[0].tolist())
    if found := _MESH.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'", found[3])
        shape = [int(size) for size in sizes.values()]
        ids = _ids(found[2] or f"[{math.prod(shape)}]").reshape(shape)
        first = tuple(slice(None) if axis in axes else 0 for axis in sizes)
        return tuple(ids[first].ravel().tolist())
    return ()


def _ids(order: str) -> np.ndarray:
    """Returns the ids of devices in an order such as "[2,4]T(1,0)"."""
    found = _ORDER.match(order)
    assert found is not None
    shape = _numbers(found[1])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(found[2])) if found[2] else ids


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _bits(dtype: str) -> int:
    """Returns the bits of an element of a dtype as HLO calls it: bf16, f8e4m3fn, u4."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
