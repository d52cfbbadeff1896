"""Documents: the Python sources on this machine, or the user's own text files."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SEPARATOR = "\n\0\n"  # between the documents of one text file
_SKIPPED = {
    *("test", "tests", "idle_test", "__pycache__"),
    *("site-packages", "dist-packages"),
}


class Document(NamedTuple):
    """A text, where it came from, and the hash that decides its split."""

    name: str
    text: str
    digest: bytes  # of the text's UTF-8 bytes


def read_documents(source: str, *, site_packages: bool = False) -> list[Document]:
    r"""Reads the documents of `source`, in a fixed order, without repetition.

    Args:
      source: "stdlib" for the running Python's standard library (`*.py`, without
        its tests); else a folder, whose `*.txt` are read recursively, or one file.
        A text file is one document, or several with "\n\0\n" between them.
      site_packages: adds the `*.py` of the installed packages to "stdlib".

    Returns:
      The non-empty documents; of those with equal text, the first.

    Raises:
      ValueError: nothing to read, or a text file that is not UTF-8.
    """
    if source == "stdlib":
        named = _python_sources(site_packages)
    else:
        named = _text_files(Path(source))
    documents: dict[bytes, Document] = {}
    for name, text in named:
        digest = hashlib.sha256(text.encode()).digest()
        if text:
            documents.setdefault(digest, Document(name, text, digest))
    if not documents:
        raise ValueError(
            "read_documents: source must hold at least one non-empty document, got "
            f"source={source!r} without any. Put text into its files."
        )
    return list(documents.values())


def split_documents(
    documents: list[Document], holdout: float
) -> tuple[list[Document], list[Document]]:
    """Splits into (train, held-out) by each document's hash alone.

    Held out are the hashes in the lowest `holdout` part of their range, but at least
    the lowest one and never all, so a document keeps its side as others come and go.

    Raises:
      ValueError: there are fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(
            "split_documents: documents must be at least two, as one is held out, got "
            f"{len(documents)}. Pass a folder of text files, or put '\\n\\0\\n' "
            "between the documents of one file."
        )
    digests = sorted(document.digest for document in documents)
    limit = int(holdout * 2**64).to_bytes(8, "big")
    count = sum(digest < limit for digest in digests)
    lowest_trained = digests[min(max(count, 1), len(digests) - 1)]
    train = [d for d in documents if d.digest >= lowest_trained]
    heldout = [d for d in documents if d.digest < lowest_trained]
    return train, heldout


def _python_sources(site_packages: bool) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every UTF-8 Python file that is not a test."""
    paths = sysconfig.get_paths()
    schemes = ("stdlib", "purelib", "platlib") if site_packages else ("stdlib",)
    for root in dict.fromkeys(paths[scheme] for scheme in schemes):
        for path in _files(Path(root), ".py", skipped=_SKIPPED):
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue  # legal in Python, which may declare another encoding
            yield path.relative_to(root).as_posix(), text


def _text_files(source: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every document of the user's text files."""
    if source.is_dir():
        root, paths = source, list(_files(source, ".txt"))
    elif source.is_file():
        root, paths = source.parent, [source]
    else:
        raise ValueError(
            'read_documents: source must be "stdlib", a folder or a text file, got '
            f"source={str(source)!r}, which does not exist."
        )
    if not paths:
        raise ValueError(
            "read_documents: source must be a folder that holds *.txt files, got "
            f"source={str(source)!r} without any. Name the files .txt or pass one file."
        )
    for path in paths:
        name = path.relative_to(root).as_posix()
        texts = _decode(path).split(SEPARATOR)
        for index, text in enumerate(texts):
            yield (f"{name}[{index}]" if len(texts) > 1 else name), text


def _decode(path: Path) -> str:
    """Reads a user's file, which must be UTF-8."""
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            "read_documents: source must hold UTF-8 text, got byte "
            f"0x{data[error.start]:02x} at offset {error.start} of {str(path)!r}. "
            "Convert the file to UTF-8."
        ) from error


def _files(
    root: Path, suffix: str, *, skipped: set[str] | frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Yields the files below `root` in an order that no file system decides."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)
        paths = (Path(folder, name) for name in sorted(names))
        yield from (p for p in paths if p.suffix == suffix and p.is_file())
