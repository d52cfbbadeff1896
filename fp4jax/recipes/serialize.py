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
        numerics.Held,
        numerics.Nearest,
        numerics.Stochastic,
        numerics.MSEden,
        numerics.Hadamard,
        numerics.FixedSigns,
        numerics.PerStepSigns,
        recipe.Fprop,
        recipe.Dgrad,
        recipe.Wgrad,
        recipe.Recipe,
        policy.Rule,
        policy.Policy,
        policy.Schedule,
    )
}


def to_json(value: Any) -> Any:
    """Converts a recipe value to what `json.dumps` takes.

    A dataclass becomes a dict of its fields with its name under "type", a format the
    dict {"format": name}; `from_json(to_json(value)) == value`.

    Args:
      value: a recipe, a policy, or a part of one.

    Returns:
      Dicts, lists, strings, numbers, booleans and None.

    Raises:
      TypeError: what is none of these.

    Example:
      >>> from fp4jax.numerics import Fresh
      >>> to_json(Fresh(448.0))
      {'type': 'Fresh', 'target': 448.0}
    """
    if isinstance(value, formats.Format):
        return {"format": value.name}
    if type(value) in _KINDS.values():
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        kind = type(value).__name__
        return {"type": kind} | {name: to_json(x) for name, x in fields.items()}
    if isinstance(value, tuple):
        return [to_json(x) for x in value]
    if not isinstance(value, bool | int | float | str | None):
        raise TypeError(
            "to_json: value must be a recipe, a policy, a schedule, or a part of one, "
            f"got {value!r}."
        )
    return value


def from_json(data: Any) -> Any:
    """Converts the result of `to_json` back to the recipe value.

    Args:
      data: what `json.loads` returns.

    Returns:
      The recipe, policy, or part of one.

    Raises:
      ValueError: an unknown type or format; an unknown or a missing field.
      TypeError: text that `json.loads` has not read; a field of the wrong type, as from
        the constructor of its value.
    """
    if isinstance(data, str):
        raise TypeError(
            "from_json: data must be what json.loads returns, got the text of "
            f"{len(data)} characters itself."
        )
    return _from_json(data)


def _from_json(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_from_json(x) for x in data)
    if not isinstance(data, dict):
        return data
    if "format" in data and "type" not in data:
        if len(data) > 1:
            raise ValueError(
                "from_json: fields of a format must be 'format' alone, got "
                f"{sorted(data)}."
            )
        return _look_up(_FORMATS, data["format"], "format")
    fields = dict(data)
    kind = _look_up(_KINDS, fields.pop("type", None), "type")
    allowed = [f.name for f in dataclasses.fields(kind)]
    needed = {
        f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING
    }
    if unknown := sorted(set(fields) - set(allowed)):
        raise ValueError(
            f"from_json: fields of {kind.__name__} must be among {allowed}, got "
            f"{unknown}."
        )
    if missing := sorted(needed - set(fields)):
        raise ValueError(
            f"from_json: fields of {kind.__name__} must include {sorted(needed)}, got "
            f"{sorted(fields)}. Add {missing}."
        )
    return kind(**{name: _from_json(x) for name, x in fields.items()})


def _look_up(table: dict[str, Any], name: Any, what: str) -> Any:
    if not isinstance(name, str) or name not in table:
        raise ValueError(
            f"from_json: {what} must be one of {sorted(table)}, got {what}={name!r}."
        )
    return table[name]
