"""What a program of the kernel works on at a time."""

import dataclasses

ROWS = 64  # of a warpgroup that multiplies
WARPGROUPS = 2  # that do
CHUNK = 64  # elements along the contraction axis that are decoded at once


@dataclasses.dataclass(frozen=True)
class Tile:
    """The sizes of a tile.

    Attributes:
      n: columns of the result, 256 at most.
      k: elements along the contraction axis.
      stages: tiles of operands that are on their way.
      snake: columns of tiles that are done before more rows are.
      peers: programs with rows of their own that load the columns once for all.
    """

    n: int = 256
    k: int = 64
    stages: int = 4
    snake: int = 8
    peers: int = 2

    @property
    def m(self) -> int:
        """Rows of the result."""
        return ROWS * WARPGROUPS
