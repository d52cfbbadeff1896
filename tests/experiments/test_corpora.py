"""Texts come out of their formats, and a source that fails stops no other."""

import gzip
import io
import json
import re
import struct
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.corpora import build, catalog, extract, packages
from experiments.corpora.packages import Packages
from fp4jax.data import DataConfig, load_corpus


def test_pages_become_what_a_reader_sees():
    pytest.importorskip("lxml")
    page = """<html><head><title>no</title></head><body><nav>no</nav>
      <div role="main"><h1>Title\u00b6</h1><p>One\n  <b>bold</b><!-- no --> word.</p>
      <script>no</script>after<pre>  a\n  b</pre><table><tr><td>1</td><td>2</td></tr>
      </table></div>tail<footer>no</footer></body></html>"""
    text = extract.html_text(page.encode())
    assert text.startswith("Title\n\nOne bold word.\n")
    assert "after\n  a\n  b\n" in text
    assert "\n1\n2" in text
    assert "no" not in text and "tail" not in text
    assert extract.html_text(b"") == extract.html_text(b"<!-- x -->") == ""


def test_sword_modules(tmp_path):
    blocks = [b"<p>In the beginning<note>x</note> &amp; so</p>", b"<title>End</title>"]
    packed = [zlib.compress(block) for block in blocks]
    folder = tmp_path / "usr/share/sword/modules/texts/ztext/web"
    folder.mkdir(parents=True)
    index = struct.pack("<3I", 0, len(packed[0]), 0) + struct.pack("<3I", 0, 0, 0)
    index += struct.pack("<3I", len(packed[0]), len(packed[1]), 0)
    (folder / "ot.bzs").write_bytes(index)
    (folder / "ot.bzz").write_bytes(b"".join(packed))
    assert list(extract.sword(tmp_path)) == ["In the beginning & so", "End"]


def test_strings_of_r(tmp_path):
    lines = ["EMMA", "", "By Jane Austen"]
    content = b"head" + b"".join(
        b"\x00\x04\x00\x09" + struct.pack(">i", len(line)) + line.encode()
        for line in lines
    )
    record = struct.pack(">i", len(content)) + zlib.compress(content)
    (tmp_path / "data.rdb").write_bytes(record * 2)
    assert list(extract.r_strings(tmp_path / "data.rdb")) == ["\n".join(lines)] * 2


def test_wordnet(tmp_path):
    folder = tmp_path / "usr/share/wordnet"
    folder.mkdir(parents=True)
    for part in ("noun", "verb", "adj", "adv"):
        line = "0001 03 n 02 big_cat 0 lion 0 000 | a large cat  "
        (folder / f"data.{part}").write_text(f"  1 licence\n{line}\n")
    assert list(extract.wordnet(tmp_path)) == ["big cat, lion: a large cat"] * 4


def test_words_lose_their_tags(tmp_path):
    path = tmp_path / "ca01"
    path.write_text("\n\n\tThe/at Fulton/np-tl 1/2/cd ./.\n")
    assert extract.tagged_words(path) == "The Fulton 1/2 ."


def test_sentences_of_an_interface(tmp_path):
    long = "A <p>sentence</p> of more than sixty characters, which is what is kept."
    value = {"a": [{"documentation": long}], "b": {"documentation": "short"}}
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        data = json.dumps(value).encode()
        wheel.writestr("x/service-2.json.gz", gzip.compress(data))
        wheel.writestr("y/service-2.json", data)
        wheel.writestr("y/other.json", "no JSON")
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        first, second = extract.described(
            wheel, r"service-2\.json", key="documentation"
        )
    assert first.splitlines()[:2] == ["A", "sentence"] and second == ""


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/* Copyright x */\nint a;", "int a;"),
        ("# SPDX License\n# y\na = 1\n", "a = 1"),
        ("// what it does\nint a;", "// what it does\nint a;"),
        ("int a; /* licence */", "int a; /* licence */"),
    ],
)
def test_licences_are_dropped(text, kept):
    assert extract.without_licence(text) == kept


def test_sources_of_folders_and_archives(tmp_path):
    for name, text in {"a/x.c": "int a;", "a/tests/y.c": "no", "a/z.h": "no"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("x.c", "int a;")
        archive.writestr("tests/y.c", "no")
        archive.writestr("big.c", "x" * 300_000)
    for place in (tmp_path, zipfile.ZipFile(tmp_path / "b.zip")):
        assert list(extract.sources(place, r"\.c$", but="/tests/")) == ["int a;"]


def test_long_texts_are_cut_at_lines():
    text = "one\ntwo\n" + "x" * 30
    parts = list(extract.cut([text, "short"], 9))
    assert "".join(parts) == text + "short"
    assert parts[0] == "one\ntwo" and max(map(len, parts)) <= 9


def test_repeats_are_dropped():
    own, shared = "own " * 50, "shared paragraph " * 20
    documents = [
        f"{own}\n\n{shared}",
        "stub",
        f"{own}2\n\n{shared}",
        f"{own}2\n\n{shared}",
    ]
    assert list(build.without_repeats(documents)) == [documents[0], f"{own}2"]


@pytest.fixture
def two_sources(monkeypatch):
    def broken(packages):
        yield "some text " * 50
        raise RuntimeError("apt-get download: no such package")

    texts = [f"text {i} " * 50 for i in range(30)]
    groups = {
        "tiny": {"good": lambda p: iter(texts), "broken": broken},
        "code": {"long": lambda p: iter(["line of code\n" * 10_000])},
        "outside": {"other": lambda p: iter(["other " * 100])},
    }
    monkeypatch.setattr(build, "GROUPS", groups)
    return groups


def test_a_source_that_fails_is_named_and_the_rest_is_kept(two_sources, tmp_path):
    out = tmp_path / "corpus"
    with ThreadPoolExecutor(1) as pool:
        built = build.build(out, list(two_sources), tmp_path / "cache", pool)
    assert json.loads((out / "sources.json").read_text()) == built
    assert built["tiny/broken"]["error"].startswith("RuntimeError: apt-get")
    assert built["tiny/good"]["documents"] == 30
    assert built["code/long"]["documents"] == 2  # cut at 100,000 characters
    files = {path.relative_to(out).as_posix() for path in out.rglob("*.txt")}
    assert files == {"tiny/good.txt", "code/long.txt", "outside/other.txt"}
    domains = json.loads((out / "mixture.json").read_text())["domains"]
    assert [domain["name"] for domain in domains] == ["tiny", "code"]
    (tiny, code) = [domain["weight"] for domain in domains]
    assert code <= 1.5 * tiny + 1e-3


def test_the_mixture_is_a_source_of_the_library(two_sources, tmp_path):
    out = tmp_path / "corpus"
    with ThreadPoolExecutor(1) as pool:
        build.build(out, ["tiny"], tmp_path / "cache", pool)
    config = DataConfig(
        source=str(out / "mixture.json"), tokenizer="bytes", vocab_size=257
    )
    (domain,) = load_corpus(config).domains
    assert domain.name == "tiny" and len(domain.train) + len(domain.heldout) == 30


def test_packages_are_fetched_once(tmp_path, monkeypatch):
    commands = []

    def run(*command, cwd):
        commands.append(command[0])
        if command[0] == "apt-get":
            if command[-1] == "gone":
                raise RuntimeError("apt-get download: no such package")
            (cwd / f"{command[-1]}_1.0.deb").touch()
        elif command[0] == "dpkg":
            (cwd / "tree" / "usr").mkdir(parents=True)
        elif command[0] == "npm":
            with tarfile.open(cwd / "a-2.0.tgz", "w:gz") as file:
                file.addfile(tarfile.TarInfo("package/a.txt"), io.BytesIO())
        else:
            zipfile.ZipFile(cwd / "b-3.0.whl", "w").close()

    monkeypatch.setattr(packages, "_run", run)
    for _ in range(2):
        found = Packages(tmp_path)
        assert (found.debian("gone", "here") / "usr").is_dir()
        assert (found.npm("@scope/a") / "a.txt").is_file()
        assert Path(found.pypi("b").filename or "").name == "b-3.0.whl"
        assert found.used == {"here_1.0.deb", "a-2.0.tgz", "b-3.0.whl"}
    assert len(commands) == 5
    with pytest.raises(RuntimeError, match="no such package"):
        Packages(tmp_path / "other").debian("gone")
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")} == {
        "other",
        "deb-gone",
        "npm-@scope+a",
        "pypi-b",
    }


def test_what_is_missing_is_one_error(monkeypatch, tmp_path, capsys):
    assert build.main([str(tmp_path), "novels"]) == 2
    assert "group must be one of tiny, prose" in capsys.readouterr().err
    monkeypatch.setattr(packages, "missing_tools", lambda: ["npm"])
    assert build.main([str(tmp_path), "tiny"]) == 2
    assert "got none of npm" in capsys.readouterr().err


def test_no_name_is_a_place():
    """Packages are asked for by name alone; where they come from is the machine's."""
    folder = Path(catalog.__file__).parent
    for path in folder.glob("*.py"):
        assert not re.search(r"\w://", path.read_text()), path
