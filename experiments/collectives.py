"""The collectives of a compiled program, read from its HLO."""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator

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
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations)="
    r"(?:\{([^}]*)\}|%?([\w.-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Groups of devices: listed, as a shape, or as axes of a mesh, some of them in part.
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_SHAPED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: as HLO calls it, such as "all-gather".
      arrays: dtype and shape of each result on one device, such as ("u8", (256, 32)).
      devices: that take part together; 0: all.
      times: how often the program runs it, loops included.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    devices: int
    times: int

    @property
    def bytes(self) -> int:
        """Of all results on one device, each time."""
        return sum(math.prod(shape) * _bits(dtype) for dtype, shape in self.arrays) // 8


def collectives(hlo: str) -> Iterator[Collective]:
    """Yields the collectives of the text of a compiled program.

    A loop whose number of turns the program does not say counts as one turn.
    """
    callers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    found: list[tuple[str, str]] = []
    entry = computation = ""
    for line in hlo.splitlines():
        if begin := _COMPUTATION.match(line):
            is_entry, computation = begin.groups()
            entry = computation if is_entry else entry
        for listed, single in _CALLED.findall(line):
            trips = _TRIPS.search(line) if " while(" in line else None
            turns = int(trips[1]) if trips else 1
            for name in listed.split(",") if listed else [single]:
                callers[name.strip(" %")].append((computation, turns))
        if _COLLECTIVE.search(line):
            found.append((computation, line))

    @functools.cache
    def times(name: str) -> int:
        if name == entry:
            return 1
        return sum(times(caller) * turns for caller, turns in callers[name])

    for name, line in found:
        yield _parse(line, times(name))


def _parse(line: str, times: int) -> Collective:
    match = _COLLECTIVE.search(line)
    assert match is not None
    result, kind, is_start = match.groups()
    arrays = tuple(
        (dtype, tuple(map(int, filter(None, sizes.split(",")))))
        for dtype, _, sizes in _ARRAY.findall(result)
    )
    if is_start and result.startswith("("):
        arrays = arrays[len(arrays) // 2 :]  # the operands come first
    return Collective(kind, arrays, _group_size(line), times)


def _group_size(line: str) -> int:
    if found := _SHAPED_GROUPS.search(line):
        return int(found[1])
    if found := _LISTED_GROUPS.search(line):
        return len(found[1].split(","))
    if found := _MESH_GROUPS.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return 0


def _bits(dtype: str) -> int:
    """Returns the bits of an element of a dtype as HLO calls it: bf16, f8e4m3fn, u4."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
