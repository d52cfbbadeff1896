"""Mixtures: what the file says, and what is wrong with it."""

import json

import pytest

from fp4jax.data import DataConfig
from fp4jax.data.mixture import DomainSource, domain_sources


def domains(tmp_path, value, **settings):
    path = tmp_path / "mixture.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return domain_sources(DataConfig(source=str(path), **settings))


def test_a_source_alone_is_one_domain():
    config = DataConfig(source="a.jsonl", text_field="content")
    assert domain_sources(config) == (
        DomainSource("text", "a.jsonl", text_field="content"),
    )


def test_paths_are_relative_to_the_file(tmp_path):
    value = {
        "domains": [
            {"name": "a", "source": "texts"},
            {"name": "b", "source": "/abs.jsonl", "weight": 3, "text_field": "body"},
            {"name": "c", "source": "stdlib", "weight": 0.5},
            {"name": "d", "source": "hf:owner/name"},
        ]
    }
    assert domains(tmp_path, value) == (
        DomainSource("a", str(tmp_path / "texts")),
        DomainSource("b", "/abs.jsonl", 3, "body"),
        DomainSource("c", "stdlib", 0.5),
        DomainSource("d", "hf:owner/name"),
    )


ONE = {"name": "a", "source": "texts"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "readable JSON, got"),
        ([], "an object"),
        ({"domains": []}, r"at least one domain, .* got \[\]"),
        ({"domains": [ONE, ONE]}, r"of different names, got \['a', 'a'\]"),
        ({"domains": [{"name": "a"}]}, "with a name and a source"),
        ({"domains": [{**ONE, "wait": 1}]}, "name, source, weight, .*got 'wait'"),
        ({"domains": [{**ONE, "weight": "1"}]}, "a weight of another type, got '1'"),
        ({"domains": [{**ONE, "weight": True}]}, "a weight of another type, got True"),
        ({"domains": [{**ONE, "weight": 0}]}, "positive weights, got 0 of a"),
        ({"domains": [{**ONE, "name": "../a"}]}, r"names of letters.*got '\.\./a'"),
        ({"domains": [{**ONE, "name": "all"}]}, "names other than 'all'"),
        ({"domains": [{**ONE, "source": "b.json"}]}, "sources of text, got 'b.json'"),
    ],
    ids=str,
)
def test_a_wrong_mixture_is_one_sentence(tmp_path, value, message):
    with pytest.raises(
        ValueError, match=f"^mixture: '.*mixture.json' must .*{message}"
    ):
        domains(tmp_path, value)


def test_a_mixture_leaves_the_field_to_its_domains(tmp_path):
    with pytest.raises(ValueError, match="Give it to its domains"):
        domains(tmp_path, {"domains": [ONE]}, text_field="body")
