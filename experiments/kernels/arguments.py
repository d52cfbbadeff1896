"""What commands take: sizes, names and files that are there, or they say so at once."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec


def one_of(names: Iterable[str]) -> PrimitiveConstructorSpec[str]:
    """Returns how one of some names is read."""
    return _spec("NAME", str, str, str, choices=tuple(names))


def _sizes(form: str) -> PrimitiveConstructorSpec[Any]:
    """Returns how positive integers are read, of a form such as MxKxN."""

    def parse(text: str) -> tuple[int, ...]:
        parts = text.split("x")
        if len(parts) != form.count("x") + 1 or not all(map(_is_positive, parts)):
            raise ValueError(f"must be {form} of positive integers, got {text!r}.")
        return tuple(map(int, parts))

    return _spec(form, tuple, parse, lambda sizes: "x".join(map(str, sizes)))


def _is_positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"must be a file that exists, got {text!r}.")
    return path


def _spec(
    metavar: str,
    kind: type,
    parse: Callable[[str], Any],
    text: Callable[..., str],
    **of,
) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [text(value)],
        **of,
    )


Matrix = Annotated[tuple[int, int], _sizes("RxC")]
Layer = Annotated[tuple[int, int, int], _sizes("MxKxN")]
Groups = Annotated[tuple[int, int, int, int], _sizes("ExMxKxN")]
File = Annotated[Path, _spec("FILE", Path, _existing, str)]
