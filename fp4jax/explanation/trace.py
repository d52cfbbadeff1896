"""Which layer, and which recipe, each product of a traced program belongs to.

While a model is traced, layers and quantized products take notes, and what they trace
is named by the number of its note. The rows of a table are the products of the final
program, so that one that was traced several times counts once.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from fp4jax.explanation.matmul import Matmul, Sizes
from fp4jax.explanation.sizes import sizes_of, sizes_of_layer
from fp4jax.ops.gemms import Gemms
from fp4jax.ops.observer import OBSERVER

_NAME = re.compile(r"fp4jax-note-(\d+)")
# What stands between a product and who wrote it.
_LIBRARIES = ("/jax/", "/flax/", "/fp4jax/ops/", "/fp4jax/explanation/")


@dataclasses.dataclass(frozen=True, eq=False)
class Note:
    """What is known of a product before its program is.

    Attributes:
      path: of its layer; None of a product that no layer owns.
      stack: function of the number of elements of one layer's kernel to the leading
        axes of layers that are stacked.
      kernel: that number, in a list that is empty until it is known.
      gemms: the product, if it is quantized.
    """

    path: str | None
    stack: Callable[[int], tuple[int, ...]] = lambda _: ()
    kernel: list[int] = dataclasses.field(default_factory=list)
    gemms: Gemms | None = None


class Trace:
    """The notes of one trace; a context to trace a model in."""

    def __init__(self):
        self._notes: list[Note] = []
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "Trace":
        self._context.enter_context(OBSERVER(functools.partial(self._product, None)))
        return self

    def __exit__(self, *_):
        self._context.close()

    @contextlib.contextmanager
    def layer(self, note: Note) -> Generator[None]:
        """A context in which every product is that of a layer."""
        with OBSERVER(functools.partial(self._product, note)), self._named(note):
            yield

    def _product(self, layer: Note | None, gemms: Gemms) -> AbstractContextManager[Any]:
        layer = Note(None) if layer is None else layer
        return self._named(dataclasses.replace(layer, gemms=gemms))

    def _named(self, note: Note) -> AbstractContextManager[Any]:
        self._notes.append(note)
        return jax.named_scope(f"fp4jax-note-{len(self._notes) - 1}")

    def matmuls(self, jaxpr: Any) -> list[Matmul]:
        """Returns the rows of a program: those of layers, then the others."""
        rows = self._rows(jaxpr, None)
        return sorted(rows, key=lambda matmul: not matmul.reachable)

    def _rows(self, jaxpr: Any, outer: Note | None) -> Iterator[Matmul]:
        for eqn in jaxpr.eqns:
            numbers = _NAME.findall(str(eqn.source_info.name_stack))
            note = self._notes[int(numbers[-1])] if numbers else outer
            kind = eqn.primitive.name
            if note is not None and note.gemms is not None:
                if kind.startswith("custom_vjp_call"):
                    yield _quantized(note, note.gemms, eqn)
                    continue  # what it multiplies inside is this product
            elif (sizes := sizes_of(eqn)) is not None:
                yield _plain(note, eqn, sizes)
                continue
            for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(sub):
                    yield from self._rows(getattr(sub, "jaxpr", sub), note)


def _quantized(note: Note, gemms: Gemms, eqn: Any) -> Matmul:
    sizes = batch, _, k, n = gemms.sizes
    if note.path is None:
        return Matmul(_place(eqn), sizes, gemms.recipe, reachable=False)
    stack = note.stack(batch * k * n)
    return Matmul(note.path, sizes, gemms.recipe, stack)


def _plain(note: Note | None, eqn: Any, sizes: Sizes) -> Matmul:
    if note is None or note.path is None:
        return Matmul(_place(eqn), sizes, None, reachable=False)
    batch, _, k, n = sizes
    kernel = note.kernel[0] if note.kernel else (batch or 1) * k * n
    stack = note.stack(kernel)
    return Matmul(note.path, sizes_of_layer(sizes, kernel, stack), None, stack)


def _place(eqn: Any) -> str:
    """Returns the scope, or the function of the user's, that a product stands in."""
    scopes = str(eqn.source_info.name_stack).split("/")
    scope = "/".join(scope for scope in scopes if not _NAME.fullmatch(scope))
    if scope:
        return f"({scope})"
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not any(name in frame.file_name for name in _LIBRARIES):
            return f"({frame.function_name}, {Path(frame.file_name).name})"
    return "(no layer)"


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")
