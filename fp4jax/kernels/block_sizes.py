"""Block sizes of kernels: one table, by device, kernel and size of the matrix.

`python -m experiments.kernels.tune` times candidates on the device that it finds, and
prints that device's part of the table.
"""

import math
from typing import Any

from fp4jax.kernels import devices
from fp4jax.kernels.tile import Tile

# Of each kernel, what is best up to so many elements of a matrix that is quantized, or
# of a product:
#   rows, columns: runs of each thread, of blocks along a row or down the columns;
#   columns_e2m1: down the columns, of E2M1 with random bits or as codes, which takes
#     more registers;
#   rows_and_columns: along each of several axes, where one kernel does them all;
#   triton_rows, triton_columns: these in Triton, where there are registers for them;
#   product: the tile of a product of a packed operand;
#   grouped_rows, grouped_weights: those of products of groups of rows.
Sizes = dict[str, tuple[tuple[float, Any], ...]]
ELSEWHERE: Sizes = {
    "rows": ((math.inf, 1),),
    "columns": ((math.inf, 2),),
    "columns_e2m1": ((math.inf, 1),),
    "rows_and_columns": ((math.inf, 2),),
    "triton_rows": ((math.inf, 2),),
    "triton_columns": ((math.inf, 2),),
    "product": (
        (1024 * 1024, Tile(n=128, k=128, stages=2, peers=1)),
        (math.inf, Tile(k=128, stages=2)),
    ),
    "grouped_rows": ((math.inf, Tile()),),
    "grouped_weights": ((math.inf, Tile()),),
}
TABLE: dict[str, Sizes] = {"NVIDIA H200": ELSEWHERE}


def best(kernel: str, elements: int) -> Any:
    """Returns the block size of a kernel on the default device.

    Args:
      kernel: one of `ELSEWHERE`.
      elements: of the matrix.
    """
    kind = devices.default().device_kind
    entries = TABLE.get(kind, ELSEWHERE)[kernel]
    return next(size for largest, size in entries if elements <= largest)
