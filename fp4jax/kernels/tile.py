"""What a program of a product works on at a time."""

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
      snake: neighboring tiles along one side that are done before more along the other.
      peers: programs of neighboring tiles, which load once what these share.
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

    def dividing(self, n: int) -> "Tile":
        """Returns it as wide as divides n columns, or itself where nothing does."""
        widths = (self.n >> i for i in range(3))
        wide = next((wide for wide in widths if n % wide == 0), self.n)
        return dataclasses.replace(self, n=wide)
