"""Rows of the study as arrays over layers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import study
from experiments.folder import Row
from experiments.operands.cases import case
from experiments.operands.measure import GEMMS

# The six operands, and the three products, as GEMM and name.
OPERANDS = [(gemm, name) for gemm, names in GEMMS.items() for name in names[:2]]
PRODUCTS = [(gemm, names.product) for gemm, names in GEMMS.items()]


@dataclasses.dataclass(frozen=True)
class Found:
    """What has been measured.

    Attributes:
      rows: of results.jsonl.
    """

    rows: Sequence[Row]

    @property
    def steps(self) -> list[int]:
        """Of which there are captures, ascending."""
        return sorted(row["step"] for row in self._of("captures"))

    @property
    def layers(self) -> list[str]:
        """Paths such as "blocks/3/mlp/up", in the order of all arrays."""
        return self._of("captures")[0]["layers"]

    @property
    def depth(self) -> np.ndarray:
        """The block of every layer."""
        return np.array([int(path.split("/")[1]) for path in self.layers])

    @property
    def cases(self) -> list[Row]:
        """What names the quantizers that the last step was measured under."""
        names = case("E2M1")
        rows = self._of("quantizers", step=self.steps[-1])
        return [{name: row[name] for name in names} for row in rows]

    def has(self, **quantizer: Any) -> bool:
        """Whether the last step was measured under a quantizer."""
        return case(**quantizer) in self.cases

    def of(
        self,
        where: tuple[str, str],
        name: str,
        *,
        step: int | None = None,
        section: str = "quantizers",
        **quantizer: Any,
    ) -> np.ndarray:
        """Returns a figure of every layer.

        Args:
          where: GEMM, and operand or product.
          name: of the figure.
          step: the last one unless given.
          section: "quantizers" or "distributions".
          **quantizer: arguments of `cases.case`.

        Raises:
          ValueError: it was not measured.
        """
        step = self.steps[-1] if step is None else step
        rows = self._of(section, step=step, **case(**quantizer))
        if not rows:
            raise ValueError(
                f"of: must be measured, got {quantizer} at step {step}. Go on without "
                "--show."
            )
        gemm, operand = where
        values = rows[0]["figures"][gemm][operand][name]
        return np.array([np.nan if x is None else x for x in values], np.float64)

    def gain(self, where: tuple[str, str], **how: Any) -> np.ndarray:
        """Returns by how many dB a rotation of 16 raises the QSNR of every layer."""
        plain, rotated = (
            self.of(where, "qsnr", rotation=rotation, **how) for rotation in (0, 16)
        )
        return rotated - plain

    def _of(self, section: str, **fields: Any) -> list[Row]:
        return study.matching(self.rows, section=section, **fields)
