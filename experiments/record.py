"""What a run writes down before its first step: its configuration and its setting."""

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import fp4jax
from experiments import presets
from experiments.presets import ExperimentConfig
from fp4jax import recipes
from fp4jax.data import Corpus
from fp4jax.train.metrics import nulls_for_nan

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "tokenizers")


def describe(
    config: ExperimentConfig, *, corpus: Corpus, command: str
) -> dict[str, Any]:
    """Returns all that it takes to repeat a comparison, as JSON has it."""
    return {
        "command": command,
        "corpus": corpus.fingerprint,
        "config": dataclasses.asdict(config),
        "policies": {
            name: recipes.to_json(presets.schedule(config, name))
            for name in config.policies
        },
        **setting(),
    }


def setting() -> dict[str, Any]:
    """Returns the versions, the commit and the device that results come from."""
    device = jax.devices()[0]
    return {
        "versions": {
            "python": platform.python_version(),
            "fp4jax": fp4jax.__version__,
            **{name: metadata.version(name) for name in _LIBRARIES},
        },
        "git": git_sha(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
        },
    }


def failure(error: Exception) -> dict[str, Any]:
    """Returns the row of a measurement that failed: the first line of its error."""
    text = str(error).partition("\n")[0]
    return {"error": f"{type(error).__name__}: {text}", **setting()}


def git_sha() -> str | None:
    """Returns the commit of this checkout, "-dirty" if changed; None outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def check_free(folder: Path) -> None:
    """Raises ValueError unless `folder` is new or empty."""
    if folder.exists() and not folder.is_dir():
        found = "a file"
    elif folder.is_dir() and any(folder.iterdir()):
        found = "a folder that holds something"
    else:
        return
    raise ValueError(
        f"--out: must be a new or an empty folder, got {str(folder)!r}, which is "
        f"{found}. Name another, or remove it."
    )


def create(folder: Path, description: dict[str, Any]) -> None:
    """Makes `folder` with its config.json, whole.

    Raises:
      ValueError: the folder cannot be made, or JSON lacks a value.
    """
    text = _text(description)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / "config.json") as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out: must be a folder that can be made, got {str(folder)!r}: {error}."
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes a value whole, for people and programs; null for NaN and infinities."""
    with whole(path) as partial:
        partial.write_text(_text(nulls_for_nan(value)), encoding="utf-8")


@contextlib.contextmanager
def whole(path: Path) -> Generator[Path, None, None]:
    """Gives where to write a file that then takes the place of an old one at once."""
    # Of this process: two commands may be at it.
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _text(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
