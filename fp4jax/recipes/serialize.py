"""Recipes, policies and their parts as JSON, and back."""

import dataclasses
from typing import Any

from fp4jax import numerics
from fp4jax.numerics import formats
from fp4jax.recipes import policy, recipe

_FORMATS = {f.name: f for f in (*formats.GRIDS, *formats.SCALE_FORMATS)}
_KINDS = {
    kind.__name__: kind
    for kind in (
        numerics.Quantizer,
        numerics.Scale,
        numerics.Fresh,
        numerics.Nearest,
        numerics.Stochastic,
        numerics.Hadamard,
        numerics.FixedSigns,
        numerics.PerStepSigns,
        recipe.Fprop,
        recipe.Dgrad,
        recipe.Wgrad,
        recipe.Recipe,
        policy.Rule,
        policy.Policy,
    )
}


def to_json(value: Any) -> Any:
    """A recipe value as what `json.dumps` takes.

    A dataclass becomes a dict of its fields with its name under "type", a format the
    dict {"format": name}; `from_json(to_json(value)) == value`.
    """
    if isinstance(value, formats.Format):
        return {"format": value.name}
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        kind = type(value).__name__
        return {"type": kind} | {name: to_json(x) for name, x in fields.items()}
    if isinstance(value, tuple):
        return [to_json(x) for x in value]
    return value


def from_json(data: Any) -> Any:
    """The recipe value of `to_json`'s result.

    Raises:
      ValueError: An unknown type, format or field.
    """
    if isinstance(data, list):
        return tuple(from_json(x) for x in data)
    if not isinstance(data, dict):
        return data
    if "format" in data and "type" not in data:
        return _look_up(_FORMATS, data["format"], "format")
    fields = dict(data)
    kind = _look_up(_KINDS, fields.pop("type", None), "type")
    allowed = [f.name for f in dataclasses.fields(kind)]
    if unknown := sorted(set(fields) - set(allowed)):
        raise ValueError(
            f"from_json: fields of {kind.__name__} must be among {allowed}, got "
            f"{unknown}."
        )
    return kind(**{name: from_json(x) for name, x in fields.items()})


def _look_up(table: dict[str, Any], name: Any, what: str) -> Any:
    if name not in table:
        raise ValueError(
            f"from_json: {what} must be one of {sorted(table)}, got {what}={name!r}."
        )
    return table[name]
