"""Files of records, read one record at a time: JSON lines, Parquet, ArrayRecord, HF."""

import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

HF = "hf:"
_ROWS = 1024  # of a Parquet or ArrayRecord file, read at once
_COMPRESSED = 2**16  # bytes of a zstd file, read at once


def read_jsonl(path: Path, field: str) -> Iterator[str]:
    """Yields the text of each line, a JSON object; blank lines hold none."""
    if not field:  # "" would make the lines themselves the text
        raise ValueError(
            "read_documents: text_field must name a field of the JSON objects of "
            f"{str(path)!r}, got text_field=''."
        )
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _text(line, field, where=f"line {number} of {str(path)!r}")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def read_parquet(path: Path, field: str) -> Iterator[str]:
    """Yields the column `field`, some rows at a time; null is no document."""
    pyarrow = _import("pyarrow", package="pyarrow")
    parquet = _import("pyarrow.parquet", package="pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise _without_field(field, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(_ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield _checked(text, field, where=f"a row of {str(path)!r}")
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise _unreadable(path, error) from error


def read_array_record(path: Path, field: str) -> Iterator[str]:
    """Yields the text of each record, a JSON object or, if `field` is "", UTF-8."""
    module = _import("array_record.python.array_record_module", package="array-record")
    try:
        reader = module.ArrayRecordReader(str(path))
        for start in range(0, count := reader.num_records(), _ROWS):
            found = reader.read([*range(start, min(start + _ROWS, count))])
            for index, record in enumerate(found, start):
                yield _text(record, field, where=f"record {index} of {str(path)!r}")
        reader.close()  # raises if the file was not whole
    except RuntimeError as error:
        raise _unreadable(path, error) from error


def read_hf(source: str, field: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the train split of hf:OWNER/NAME[/CONFIG], streamed."""
    datasets = _import("datasets", package="datasets")
    name = source.removeprefix(HF)
    owner, *rest = name.split("/", 2)
    path, settings = "/".join([owner, *rest[:1]]), rest[1:]
    try:
        rows = datasets.load_dataset(path, *settings, split="train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            "read_documents: source must name a dataset that can be loaded, "
            f"hf:OWNER/NAME[/CONFIG], got source={source!r}: {error}"
        ) from error
    for index, row in enumerate(rows):
        if field not in row:
            raise _without_field(field, row, f"{source!r}")
        where = f"{name}[{index}]"
        yield where, _checked(row[field], field, where=where)


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".jsonl.zst": read_jsonl,
    ".parquet": read_parquet,
    ".array_record": read_array_record,
}


def _open(path: Path) -> BinaryIO:
    """Opens a file of lines, decompressed if its name says so."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # pyrefly: ignore[bad-return]
    if path.suffix == ".zst":
        zstandard = _import("zstandard", package="zstandard")
        return io.BufferedReader(_Zstd(path.open("rb"), zstandard))
    return path.open("rb")


class _Zstd(io.RawIOBase):
    """The bytes of a zstd file of one frame or several; raises if the last is cut."""

    def __init__(self, file: BinaryIO, zstandard: ModuleType):
        self._file, self._zstandard = file, zstandard
        self._frame, self._compressed, self._bytes = None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._bytes:
            self._compressed = self._compressed or self._file.read(_COMPRESSED)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last frame is not whole")
                return 0
            self._decompress()
        size = min(len(buffer), len(self._bytes))
        buffer[:size], self._bytes = self._bytes[:size], self._bytes[size:]
        return size

    def _decompress(self) -> None:
        decompressor = self._zstandard.ZstdDecompressor()
        frame = self._frame or decompressor.decompressobj()
        try:
            self._bytes = memoryview(frame.decompress(self._compressed))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._compressed = frame.unused_data
        self._frame = None if frame.eof else frame

    def close(self) -> None:
        self._file.close()
        super().close()


def _text(record: bytes, field: str, *, where: str) -> str:
    """Returns the text of one record: a field of its JSON object, or all of it."""
    try:
        value = json.loads(record) if field else record.decode()
    except ValueError as error:
        raise ValueError(
            f"read_documents: {where} must be "
            f"{'a JSON object' if field else 'UTF-8 text'}, got {record[:40]!r}: "
            f"{error}. Is the file truncated?"
        ) from error
    if not field:
        return value
    if not isinstance(value, dict):
        raise ValueError(
            f"read_documents: {where} must be a JSON object, got {record[:40]!r}."
        )
    if field not in value:
        raise _without_field(field, value, where)
    return _checked(value[field], field, where=where)


def _checked(value: Any, field: str, *, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"read_documents: field {field!r} must be text, got "
            f"{type(value).__name__} in {where}. Choose another with text_field."
        )
    return value or ""


def _without_field(field: str, fields: Any, where: str) -> ValueError:
    return ValueError(
        f"read_documents: text_field must be one of {', '.join(fields)}, got "
        f"text_field={field!r} for {where}."
    )


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"read_documents: source must hold readable files, got {str(path)!r}: "
        f"{type(error).__name__}: {error}. Is it truncated?"
    )


def _import(name: str, *, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "" if package == "datasets" else ", or pip install 'fp4jax[data]'"
        raise ImportError(
            f"read_documents: this source needs the package {package}, which cannot be "
            f"imported ({error}). pip install {package}{extra}."
        ) from error
