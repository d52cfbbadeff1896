"""Mixtures: named domains, each a source with a weight, in one JSON file.

    {"domains": [{"name": "english", "source": "books", "weight": 3},
                 {"name": "code", "source": "code.jsonl.zst", "weight": 1,
                  "text_field": "content"}]}

No name may be "all", that of the domains together. A weight is the domain's share of
the rows of training, relative to the others and to within 1%. Paths are relative to the
file; "stdlib" and "hf:NAME" are what they are in `DataConfig`.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fp4jax.data.config import DataConfig
from fp4jax.data.records import HF
from fp4jax.data.sources import Document, read_documents

_FIELDS = {"name": str, "source": str, "weight": int | float, "text_field": str}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TOTAL = "all"  # what evaluations call the sum over domains


class DomainSource(NamedTuple):
    """Where the documents of a domain come from, and its part of the mixture."""

    name: str
    source: str
    weight: float = 1.0
    text_field: str = "text"
    site_packages: bool = False

    def documents(self) -> Iterator[Document]:
        """Yields them, as `read_documents` does."""
        return read_documents(
            self.source, text_field=self.text_field, site_packages=self.site_packages
        )


def domain_sources(config: DataConfig) -> tuple[DomainSource, ...]:
    """Returns the domains of a mixture, or "text" alone for any other source.

    Raises:
      ValueError: a mixture that is not as above.
    """
    path = Path(config.source)
    if path.suffix != ".json":
        single = DomainSource(
            "text",
            config.source,
            text_field=config.text_field,
            site_packages=config.site_packages,
        )
        return (single,)
    if config.text_field != "text":
        raise ValueError(
            'DataConfig: text_field must be "text" for a mixture, got '
            f"text_field={config.text_field!r}. Give it to its domains in {path}."
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(path, f"readable JSON, got: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("domains"), list):
        raise _wrong(path, 'an object {"domains": [...]}')
    domains = tuple(_domain(path, fields) for fields in value["domains"])
    names = [domain.name for domain in domains]
    if not domains or len(set(names)) < len(names):
        raise _wrong(path, f"at least one domain, of different names, got {names}")
    return domains


def _domain(path: Path, fields: Any) -> DomainSource:
    if not isinstance(fields, dict) or not {"name", "source"} <= fields.keys():
        raise _wrong(path, f"domains with a name and a source, got {fields!r}")
    for name, value in fields.items():
        if name not in _FIELDS:
            raise _wrong(path, f"domains of {', '.join(_FIELDS)}, got {name!r}")
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise _wrong(path, f"a {name} of another type, got {value!r}")
    domain = DomainSource(**fields)
    if not _NAME.fullmatch(domain.name):
        raise _wrong(path, f"names of letters, digits, _ - and ., got {domain.name!r}")
    if domain.name == _TOTAL:
        raise _wrong(path, f"names other than {_TOTAL!r}, that of all domains together")
    if not (domain.weight > 0 and math.isfinite(domain.weight)):
        raise _wrong(path, f"positive weights, got {domain.weight} of {domain.name}")
    if domain.source == "stdlib" or domain.source.startswith(HF):
        return domain
    source = path.parent / domain.source
    if source.suffix == ".json" or (source / "index.json").is_file():
        raise _wrong(
            path, f"sources of text, got {domain.source!r}, a mixture or tokens"
        )
    return domain._replace(source=str(source))


def _wrong(path: Path, expected: str) -> ValueError:
    return ValueError(f"mixture: {str(path)!r} must hold {expected}.")
