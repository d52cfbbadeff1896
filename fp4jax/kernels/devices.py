"""What the default device can run."""

import importlib
from typing import Any

import jax

WARPGROUP = 128  # threads that work together, of which each holds whole runs
TILE_OF_SQUARES = 32, 128  # rows and columns of square blocks that they hold
_MOSAIC_CAPABILITY, _TRITON_CAPABILITY = 9, 8
_CORES = 132  # where a device does not tell how many it has, those of an H200
_MOSAIC_JAX = (0, 11)


def default() -> jax.Device:
    """Returns the device that computes what is not told where."""
    config: Any = jax.config
    named = config.jax_default_device
    if isinstance(named, str):
        return jax.local_devices(backend=named)[0]
    return named or jax.local_devices()[0]


def cores() -> int:
    """Returns how many programs the default device runs side by side."""
    return getattr(default(), "core_count", None) or _CORES


def without_mosaic() -> str | None:
    """Returns why Pallas Mosaic GPU kernels cannot run here, or None."""
    if (why := too_old()) is not None:
        return why
    return too_small(_MOSAIC_CAPABILITY)


def without_triton() -> str | None:
    """Returns why Triton kernels cannot run here, or None."""
    if (why := too_small(_TRITON_CAPABILITY)) is not None:
        return why
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:
        return f"jax-triton must be installed, got {error}"
    return None


def without_wgmma() -> str | None:
    """Returns why kernels cannot multiply as Hopper GPUs do here, or None."""
    if (why := without_mosaic()) is not None or capability() == _MOSAIC_CAPABILITY:
        return why
    return f"the device must be a Hopper GPU, got {default().device_kind!r}"


def interpreter() -> Any:
    """Returns how `plgpu.kernel` interprets a kernel."""
    from jax.experimental.pallas import mosaic_gpu

    params: Any = getattr(mosaic_gpu, "InterpretGPUParams")  # noqa: B009
    return params()


def too_old() -> str | None:
    """Returns why JAX knows no Pallas Mosaic GPU kernels like ours, or None."""
    if jax.__version_info__[:2] < _MOSAIC_JAX:
        return f"JAX must be at least 0.11, got {jax.__version__}"
    return None


def capability() -> int:
    """Returns the compute capability of the default device, 0 of no NVIDIA GPU."""
    device = default()
    major = str(getattr(device, "compute_capability", None)).partition(".")[0]
    return int(major) if device.platform == "gpu" and major.isdecimal() else 0


def too_small(least: int) -> str | None:
    """Returns why the default device is no GPU of a capability or later, or None."""
    if capability() >= least:
        return None
    return (
        "the device must be an NVIDIA GPU of compute capability "
        f"{least}.0 or later, got {default().device_kind!r}"
    )
