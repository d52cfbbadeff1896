"""The table of the matrix products of a model."""

import dataclasses
import io
import itertools
from typing import Any

import rich.console
import rich.table

from fp4jax.explanation.matmul import GEMMS, MEANINGS, Matmul

_OF_A_CALL = (
    "fresh, held: the amax of x and of dy is taken per microbatch, of the rows of one "
    "call, not of the whole batch."
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A table of the matrix products of a model; prints, and shows in a notebook.

    Attributes:
      matmuls: in the order of the model.
    """

    matmuls: tuple[Matmul, ...]

    @property
    def quantizations(self) -> int:
        """Quantized operands that one traced forward and backward pass computes.

        Layers stacked for a scan count once, as in the program.
        """
        return sum(matmul.quantizations for matmul in self.matmuls)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a line of the table does not show."""
        recipes = [matmul.recipe for matmul in self.matmuls if matmul.recipe]
        quantizers = [
            quantizer
            for recipe in recipes
            for site, quantizer in recipe.sites.items()
            if not site.is_w
        ]
        takes_amax = any(q is not None and q.tensor_scale for q in quantizers)
        return (_OF_A_CALL,) if takes_amax else ()

    @property
    def legend(self) -> tuple[str, ...]:
        """What the columns mean, and those words that the table has."""
        columns = "m x k x n: tokens, input and output features"
        recipes = [matmul.recipe for matmul in self.matmuls if matmul.recipe]
        if not recipes:
            return (f"{columns}.",)
        columns += "; fprop: y = x w, dgrad: dx = dy w^T, wgrad: dw = x^T dy."
        if not any(q for recipe in recipes for q in recipe.sites.values()):
            return (columns,)
        pairs = (m.operands(gemm) for m in self.matmuls for gemm in GEMMS)
        text = " ".join(itertools.chain.from_iterable(pairs))
        words = (meaning for word, meaning in MEANINGS.items() if word in text)
        operand = (
            "Operands: grid, block under one scale, format of the scale, rounding."
        )
        return columns, operand, f"{'; '.join(words)}."

    def to_json(self) -> list[dict[str, Any]]:
        """Returns what `json.dumps` takes: one dict for each product."""
        return [matmul.to_json() for matmul in self.matmuls]

    def _table(self) -> rich.table.Table:
        count = f"Quantizations, forward and backward: {self.quantizations}."
        table = rich.table.Table(
            caption="\n".join((count, *self.legend, *self.notes)),
            show_lines=True,
        )
        for column in ("layer", "m x k x n", "compute", *GEMMS):
            table.add_column(column, overflow="fold")
        for matmul in self.matmuls:
            table.add_row(
                matmul.path or "(the model)",
                _sizes(matmul),
                matmul.compute,
                *(
                    "\n".join(matmul.operands(gemm)) if matmul.recipe else ""
                    for gemm in GEMMS
                ),
            )
        return table

    def __str__(self) -> str:
        return self._render().export_text()

    def _repr_html_(self) -> str:
        return self._render().export_html(
            inline_styles=True, code_format="<pre>{code}</pre>"
        )

    def _render(self) -> rich.console.Console:
        console = rich.console.Console(
            file=io.StringIO(), record=True, width=160, force_jupyter=False
        )
        console.print(self._table())
        return console


def _sizes(matmul: Matmul) -> str:
    """Returns stack, batch, and m x k x n, such as "3 x 2 of 8 x 64 x 32"."""
    batch, *sizes = matmul.sizes
    stack = "".join(f"{n} x " for n in matmul.stack)
    of = "" if batch in (1, None) else f"{batch} of "
    return stack + of + " x ".join("m" if n is None else str(n) for n in sizes)
