"""Which documents are read, and in which order."""

import sysconfig

import pytest

from fp4jax.data import sources
from fp4jax.data.sources import read_documents


def read(folder):
    return [(d.name, d.text) for d in read_documents(str(folder))]


def test_the_standard_library_is_read_without_tests_and_packages():
    names = [d.name for d in read_documents("stdlib")]
    assert "json/decoder.py" in names
    assert names == [d.name for d in read_documents("stdlib")]
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}


def test_python_sources(tmp_path, monkeypatch):
    library, packages = tmp_path / "library", tmp_path / "library" / "site-packages"
    paths = {"stdlib": library, "purelib": packages, "platlib": packages}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    for name, data in {
        "b.py": b"b",
        "a/c.py": b"c",
        "a/copy_of_c.py": b"c",
        "a/empty.py": b"",
        "a/latin.py": b"\xe9",
        "a/notes.txt": b"n",
        "test/d.py": b"d",
        "a/tests/e.py": b"e",
        "__pycache__/f.py": b"f",
        "site-packages/g/h.py": b"h",
        "site-packages/g/test/i.py": b"i",
    }.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(data)
    own = [d.name for d in read_documents("stdlib")]
    assert own == ["b.py", "a/c.py", "a/copy_of_c.py"]
    both = [d.name for d in read_documents("stdlib", site_packages=True)]
    assert both == [*own, "g/h.py"]


def test_text_files_hold_one_document_or_several(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "x.txt").write_text("once\n")
    (tmp_path / "b.txt").write_text("one\n\0\ntwo\n\0\n")
    (tmp_path / "a.txt").write_bytes("gr\u00fc\u00df\r\n".encode())
    (tmp_path / "c.md").write_text("ignored")
    files = {
        "a.txt": "gr\u00fc\u00df\r\n",
        "b.txt[0]": "one",
        "b.txt[1]": "two",
        "deep/er/x.txt": "once\n",
    }
    assert read(tmp_path) == list(files.items())
    assert read(tmp_path / "c.md") == [("c.md", "ignored")]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_large_files_are_read_in_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    texts = ["one", "\0 two\n", "", "gr\u00fc\u00df\r\n", "\0", "end"]
    path = tmp_path / "a.txt"
    path.write_bytes(sources.SEPARATOR.join(texts).encode())
    assert read(path) == [(f"a.txt[{i}]", t) for i, t in enumerate(texts) if t]
    path.write_bytes(b"one\n\0\ntwo\xff")
    with pytest.raises(ValueError, match="byte 0xff at offset 9 of"):
        read(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "be \"stdlib\", a folder or a file, got source='.*/text'"),
        ({}, r"files of one kind, \*\.txt, .* got source='.*/text' without any"),
        ({"a.md": b"a"}, r"files of one kind, \*\.txt, .* without any"),
        ({"a.txt": b"a", "b.jsonl": b"{}"}, "files of one kind.*with several"),
        ({"a.txt": b"ab\xff"}, "UTF-8 text, got byte 0xff at offset 2 of '.*a.txt'"),
    ],
    ids=["missing", "empty folder", "no text file", "two kinds", "not utf-8"],
)
def test_bad_sources_raise(tmp_path, files, message):
    folder = tmp_path / "text"
    if files is not None:
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"^read_documents: source must .*{message}"):
        list(read_documents(str(folder)))


def test_a_text_has_no_fields(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for source in (str(tmp_path), "stdlib"):
        with pytest.raises(ValueError, match='text_field must be "text" for a source'):
            next(read_documents(source, text_field="content"))
