"""Files of records give the same documents whatever their format, or say what is wrong.

The libraries that write them here read them back in other tests of their own: a text
that survives was written and read as its format says.
"""

import gzip
import json
import sys

import pytest

from fp4jax.data import records
from fp4jax.data.sources import read_documents

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")
ARRAY_RECORD = "array_record.python.array_record_module"
array_record = pytest.importorskip(ARRAY_RECORD)

TEXTS = ["one", "gr\u00fc\u00df\n\0\n\U0001f600", "", "four" * 5000]


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: t}) + "\n" for t in texts).encode()


def write(path, texts=TEXTS, field="text"):
    name = path.name
    if name.endswith(".jsonl"):
        path.write_bytes(lines(texts, field))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines(texts, field)))
    elif name.endswith(".zst"):  # two frames, as parallel compressors write them
        halves = lines(texts[:2], field), lines(texts[2:], field)
        path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, halves)))
    elif name.endswith(".parquet"):
        table = pyarrow.table({"id": [1] * len(texts), field: texts})
        parquet.write_table(table, path, row_group_size=2)
    else:
        writer = array_record.ArrayRecordWriter(str(path), "group_size:1")
        for text in texts:
            record = lines([text], field) if field else text.encode()
            writer.write(record)
        writer.close()
    return path


@pytest.fixture(params=records.READERS)
def path(request, tmp_path):
    return tmp_path / f"data{request.param}"


def read(path, **settings):
    return [d.text for d in read_documents(str(path), **settings)]


def test_every_format_gives_the_same_documents(path):
    write(path)
    assert read(path) == read(path.parent) == [text for text in TEXTS if text]
    names = [d.name for d in read_documents(str(path))]
    assert names == [f"{path.name}[{i}]" for i in (0, 1, 3)]


def test_the_field_can_be_another(path):
    write(path, field="content")
    assert read(path, text_field="content") == [text for text in TEXTS if text]
    with pytest.raises(ValueError, match="text_field must be one of id, content, got"):
        read(path)


def test_a_folder_of_files_is_read_in_order(path):
    endings = path.name.removeprefix("data")
    for name, texts in (("b/a", ["3"]), ("b", ["2"]), ("a", ["0", "1"])):
        (path.parent / name).parent.mkdir(exist_ok=True)
        write(path.parent / f"{name}{endings}", texts)
    assert read(path.parent) == ["0", "1", "2", "3"]


def test_a_truncated_file_is_named(path):
    size = len(write(path, [f"{i}" * 999 for i in range(40)]).read_bytes())
    path.write_bytes(path.read_bytes()[: size * 2 // 3])
    with pytest.raises(ValueError, match=f"^read_documents: .*{path.name}.*truncated"):
        read(path)


def test_records_are_streamed(tmp_path):
    """The first document comes before a bad line further down is met."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["one"]) + b"\n{]\n")
    documents = read_documents(str(path))
    assert next(documents).text == "one"
    with pytest.raises(ValueError, match=r"line 3 of '.*a.jsonl' must be a JSON"):
        next(documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "must be a JSON object, got b'.1.'"),
        (b'{"text": 3}', "field 'text' must be text, got int in line 1"),
        (b'{"text": "\\ud800"}', "must hold Unicode text, got '.ud800' at character 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.jsonl")


def test_lines_are_no_text_themselves(tmp_path):
    path = write(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="text_field must name a field .* got text_fi"):
        read(path, text_field="")


def test_null_is_no_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "a"}\n')
    assert read(tmp_path / "a.jsonl") == ["a"]


def test_array_records_may_be_the_text_itself(tmp_path):
    path = write(tmp_path / "a.array_record", field="")
    assert read(path, text_field="") == [text for text in TEXTS if text]
    with pytest.raises(ValueError, match="record 0 of .* must be a JSON object"):
        read(path)


@pytest.mark.parametrize(
    ("library", "name", "remedy"),
    [
        ("pyarrow", "a.parquet", r"pip install pyarrow, or .*fp4jax\[data\]"),
        ("zstandard", "a.jsonl.zst", r"pip install zstandard, or .*fp4jax\[data\]"),
        (ARRAY_RECORD, "a.array_record", r"pip install array-record, or .*\[data\]"),
        ("datasets", "hf:some/text", r"pip install datasets\.$"),
    ],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, library, name, remedy):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    source = name if name.startswith("hf:") else str(tmp_path / name)
    with pytest.raises(ImportError, match=f"^read_documents: this source.*{remedy}"):
        read(source)


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:name", ("name",)),
        ("hf:owner/name", ("owner/name",)),
        ("hf:owner/name/config", ("owner/name", "config")),
    ],
)
def test_hugging_face_datasets_are_streamed(monkeypatch, source, asked):
    class Datasets:
        def load_dataset(*given, **settings):
            assert given[1:] == asked
            assert settings == {"split": "train", "streaming": True}
            return iter({"id": 1, "text": text} for text in TEXTS)

    monkeypatch.setitem(sys.modules, "datasets", Datasets())
    found = list(read_documents(source))
    assert [d.text for d in found] == [text for text in TEXTS if text]
    assert found[0].name == f"{source.removeprefix('hf:')}[0]"
    with pytest.raises(ValueError, match="text_field must be one of id, text"):
        read(source, text_field="content")


def test_a_dataset_that_cannot_be_loaded_is_named(monkeypatch):
    class Datasets:
        def load_dataset(*given, **settings):
            raise FileNotFoundError("no such dataset")

    monkeypatch.setitem(sys.modules, "datasets", Datasets())
    with pytest.raises(ValueError, match="got source='hf:no/text': no such dataset"):
        read("hf:no/text")
