"""What a run writes down before its first step: its configuration and its setting."""

import dataclasses
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import fp4jax
from experiments.presets import ExperimentConfig
from fp4jax import policies, recipes

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "tokenizers")


def describe(config: ExperimentConfig, *, command: str) -> dict[str, Any]:
    """Returns all that it takes to repeat a comparison, as JSON has it."""
    device = jax.devices()[0]
    return {
        "command": command,
        "config": dataclasses.asdict(config),
        "policies": {
            name: recipes.to_json(policies.PRESETS[name](config.model))
            for name in config.policies
        },
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
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"--out: must be a new or an empty folder, got {str(folder)!r}, which "
            "holds something. Name another, or remove it."
        )


def create(folder: Path, description: dict[str, Any]) -> None:
    """Makes `folder` with its config.json: whole, or not at all."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        write_json(partial / "config.json", description)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a value for people and programs to read."""
    text = json.dumps(value, indent=2, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")
