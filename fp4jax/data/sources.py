"""Documents, one after the other: text files, records, or Python's own sources."""

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fp4jax.data import records

SEPARATOR = "\n\0\n"  # between the documents of one text file
_SKIPPED = {
    *("test", "tests", "idle_test", "__pycache__"),
    *("site-packages", "dist-packages"),
}
_CHUNK = 2**24  # bytes of a text file, read at once
_ENDINGS = (".txt", *records.READERS)

Named = Iterator[tuple[str, str]]  # (name, text)


class Document(NamedTuple):
    """A text, where it came from, and the hash that decides its split."""

    name: str
    text: str
    digest: bytes  # of the text's UTF-8 bytes


def read_documents(
    source: str, *, text_field: str = "text", site_packages: bool = False
) -> Iterator[Document]:
    r"""Yields the non-empty documents of `source` in a fixed order, as they are read.

    Args:
      source: "stdlib" for the running Python's standard library (`*.py`, without its
        tests); "hf:NAME" for a Hugging Face dataset; else a file, or a folder that is
        read recursively and holds one kind of file. A text file is one document, or
        several with "\n\0\n" between them; other kinds hold a document a record.
      text_field: of a record, the one that holds its text.
      site_packages: adds the `*.py` of the installed packages to "stdlib".

    Raises:
      ValueError: nothing to read, a file that cannot be read or is not what its name
        says, text that is not UTF-8, or a text field of a source without fields.
      ImportError: the library that reads such files is not installed.
    """
    if source == "stdlib":
        _check_no_field(source, text_field)
        named = _python_sources(site_packages)
    elif source.startswith(records.HF):
        named = records.read_hf(source, text_field)
    else:
        named = _read_files(Path(source), text_field)
    try:
        for name, text in named:
            if text:
                yield Document(name, text, hashlib.sha256(_utf8(name, text)).digest())
    except OSError as error:  # the caller's own are another matter
        raise ValueError(
            f"read_documents: source must be readable, got source={source!r}: {error}."
        ) from error


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise ValueError(
            "read_documents: source must hold Unicode text, got "
            f"{text[error.start]!r} at character {error.start} of {name}. Remove it."
        ) from error


def _check_no_field(source: str, text_field: str) -> None:
    if text_field != "text":
        raise ValueError(
            'read_documents: text_field must be "text" for a source that has no '
            f"fields, got text_field={text_field!r} with source={source!r}."
        )


def _python_sources(site_packages: bool) -> Named:
    """Yields every UTF-8 Python file that is not a test."""
    paths = sysconfig.get_paths()
    schemes = ("stdlib", "purelib", "platlib") if site_packages else ("stdlib",)
    for root in dict.fromkeys(paths[scheme] for scheme in schemes):
        for path in _files(Path(root), (".py",), skipped=_SKIPPED):
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue  # legal in Python, which may declare another encoding
            yield path.relative_to(root).as_posix(), text


def _read_files(source: Path, text_field: str) -> Named:
    """Yields the documents of the user's files, which are all of one kind."""
    if source.is_dir():
        root, paths = source, list(_files(source, _ENDINGS))
    elif source.is_file():
        root, paths = source.parent, [source]
    else:
        raise ValueError(
            'read_documents: source must be "stdlib", a folder or a file, got '
            f"source={str(source)!r}, which does not exist."
        )
    readers = dict.fromkeys(map(_reader, paths))
    if len(readers) != 1:
        found = "without any" if not paths else "with several of these kinds"
        raise ValueError(
            "read_documents: source must be a folder that holds files of one kind, "
            f"{', '.join('*' + ending for ending in _ENDINGS)}, got "
            f"source={str(source)!r} {found}. Name the files so, pass one file, or "
            "make the kinds the domains of a mixture."
        )
    (reader,) = readers
    if reader is None:
        _check_no_field(str(source), text_field)
    for path in paths:
        name = path.relative_to(root).as_posix()
        if reader is None:
            yield from _read_text(path, name)
        else:
            texts = reader(path, text_field)
            yield from ((f"{name}[{i}]", text) for i, text in enumerate(texts))


def _reader(path: Path) -> Callable[[Path, str], Iterator[str]] | None:
    """Returns the reader of a file of records; None stands for plain text."""
    endings = (e for e in records.READERS if path.name.endswith(e))
    return next((records.READERS[ending] for ending in endings), None)


def _read_text(path: Path, name: str) -> Named:
    """Yields the documents of a user's text file, which must be UTF-8."""
    with path.open("rb") as stream:
        parts = _parts(stream)
        first, second = next(parts), next(parts, None)
        several = second is not None
        parts = itertools.chain([first], [second] if several else [], parts)
        for index, (offset, part) in enumerate(parts):
            try:
                text = part.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    "read_documents: source must hold UTF-8 text, got byte "
                    f"0x{part[error.start]:02x} at offset {offset + error.start} of "
                    f"{str(path)!r}. Convert the file to UTF-8."
                ) from error
            yield (f"{name}[{index}]" if several else name), text


def _parts(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, bytes) of each document of a text file, some at a time."""
    separator, offset, rest = SEPARATOR.encode(), 0, b""
    while chunk := stream.read(_CHUNK):
        *parts, rest = (rest + chunk).split(separator)
        for part in parts:
            yield offset, part
            offset += len(part) + len(separator)
    yield offset, rest


def _files(
    root: Path,
    endings: tuple[str, ...],
    *,
    skipped: set[str] | frozenset[str] = frozenset(),
) -> Iterator[Path]:
    """Yields the files below `root` in an order that no file system decides."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)
        paths = (Path(folder, name) for name in sorted(names))
        yield from (p for p in paths if p.name.endswith(endings) and p.is_file())
