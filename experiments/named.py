"""Policies by the names that commands take: published ones, and those of a file."""

import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from fp4jax import policies
from fp4jax.policies import HasLayers, Policy
from fp4jax.recipes import Recipe

OWN = "FILE.py:FUNCTION"


def policy(name: str, *, flag: str = "--policies") -> Callable[[HasLayers], Policy]:
    """Returns what makes the policy of a model.

    Args:
      name: from `fp4jax.policies.PRESETS`, or "FILE.py:FUNCTION". The function takes no
        arguments or the model's config, and returns a `Recipe` or a `Policy`.
      flag: the option that has the name.

    Returns:
      The policy by the model's config. It raises ValueError where a function of a file
      raises, returns something else, or has a rule without a layer.

    Raises:
      ValueError: no such name, file or function, or a file that cannot be imported.
    """
    if name in policies.PRESETS:
        return policies.PRESETS[name]
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(
            f"{flag}: must be one of {', '.join(policies.PRESETS)}, or {OWN}, got "
            f"{name!r}."
        )
    path = Path(file).absolute()
    if not path.is_file():
        raise ValueError(
            f"{flag}: must name a file that is there, got {name!r}. Relative paths "
            f"begin at {str(Path.cwd())!r}."
        )
    try:
        found = _functions(_module(path))
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        where = ". What it imports must be in the current folder or in PYTHONPATH."
        raise ValueError(
            f"{flag}: {file!r} must be Python that can be imported, it raised "
            f"{_described(error, path)}{where if is_missing else ''}"
        ) from error
    if function not in found:
        raise ValueError(
            f"{flag}: {file!r} must define a function {function!r}, got "
            f"{', '.join(found) or 'none at all'}. Name one that it defines."
        )
    return functools.partial(_made, found[function], name, path)


def file_name(name: str) -> str:
    """Returns a name as a file or a folder can have it.

    Example:
      >>> file_name("ufp4"), file_name("../my recipes/mine.py:mixed")
      ('ufp4', 'my-recipes-mine.py-mixed')
    """
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")  # not hidden by a dot


def check_file_names(names: Iterable[str]) -> None:
    """Raises ValueError where two policies would have one folder."""
    by_file: dict[str, str] = {}
    for name in names:
        if (other := by_file.setdefault(file_name(name), name)) != name:
            raise ValueError(
                "--policies: must have folders of their own, got "
                f"{other!r} and {name!r}, both of which have {file_name(name)!r}. "
                "Leave one out, or rename a function or a file."
            )


@functools.cache
def _module(path: Path) -> ModuleType:
    """Returns what a file defines, which is run once."""
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None  # as its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Returns the functions of a module by name, without those that it imports."""
    return {
        name: value
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__
    }


def _made(
    function: Callable[..., Any], name: str, path: Path, config: HasLayers
) -> Policy:
    """Returns the policy that a function of a file makes for a model.

    Args:
      function: of the file.
      name: what the command takes.
      path: of the file.
      config: the model's.
    """
    takes = inspect.signature(function).parameters.values()
    needs_config = any(
        p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in takes
    )
    try:
        found = function(*([config] if needs_config else []))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name}: must return a Recipe or a Policy, it raised "
            f"{_described(error, path)}"
        ) from error
    if isinstance(found, Recipe):
        return Policy(found)
    if not isinstance(found, Policy):
        raise ValueError(
            f"{name}: must return a Recipe or a Policy of fp4jax, got "
            f"{type(found).__name__}. Return one of them."
        )
    found.check(config.layer_paths)
    return found


def _described(error: BaseException, path: Path) -> str:
    """Returns an error, and the line of a file that it comes from."""
    calls = traceback.extract_tb(error.__traceback__)
    lines = [call.lineno for call in calls if call.filename == str(path)]
    where = f" in line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}: {error}"
