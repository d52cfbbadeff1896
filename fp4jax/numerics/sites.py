"""The six quantization sites of a linear layer and their streams of random bits."""

import enum

OPERANDS = ("x", "w", "dy")  # of a layer


class Site(enum.IntEnum):
    """An operand of one of the three GEMMs: y = x w, dx = dy w^T, dw = x^T dy.

    A site names the streams that it draws from a key: rounding bits of its own, and
    signs that the two operands of its GEMM share. The numbers are fixed for good.
    """

    FPROP_X = 0
    FPROP_W = 1
    DGRAD_DY = 2
    DGRAD_W = 3
    WGRAD_X = 4
    WGRAD_DY = 5

    @property
    def rounding_stream(self) -> int:
        """Stream of the bits of stochastic rounding."""
        return int(self)

    @property
    def signs_stream(self) -> int:
        """Stream of the signs of the Hadamard transform, one for each GEMM."""
        return 8 + self // 2

    @property
    def operand(self) -> int:
        """Which of `OPERANDS` it quantizes: 0, 1 or 2."""
        return (0, 1, 2, 1, 0, 2)[self]

    @property
    def is_w(self) -> bool:
        """Whether it quantizes the weight, which has no tokens."""
        return self in (Site.FPROP_W, Site.DGRAD_W)

    @property
    def is_wgrad(self) -> bool:
        """Whether its GEMM is wgrad, which contracts the tokens."""
        return self in (Site.WGRAD_X, Site.WGRAD_DY)
