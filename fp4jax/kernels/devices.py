"""What the default device can run."""

from typing import Any

import jax

WARPGROUP = 128  # threads that work together, of which each holds whole runs
TILE_OF_SQUARES = 32, 128  # rows and columns of square blocks that they hold
_MOSAIC_CAPABILITY = 9
_MOSAIC_JAX = (0, 11)


def default() -> jax.Device:
    """Returns the device that computes what is not told where."""
    config: Any = jax.config
    named = config.jax_default_device
    if isinstance(named, str):
        return jax.local_devices(backend=named)[0]
    return named or jax.local_devices()[0]


def without_mosaic() -> str | None:
    """Returns why Pallas Mosaic GPU kernels cannot run here, or None."""
    if (why := too_old()) is not None:
        return why
    device = default()
    major = str(getattr(device, "compute_capability", None)).partition(".")[0]
    if device.platform == "gpu" and major.isdecimal():
        if int(major) >= _MOSAIC_CAPABILITY:
            return None
    return (
        "the device must be an NVIDIA GPU of compute capability "
        f"{_MOSAIC_CAPABILITY}.0 or later, got {device.device_kind!r}"
    )


def too_old() -> str | None:
    """Returns why JAX knows no Pallas Mosaic GPU kernels like ours, or None."""
    if jax.__version_info__[:2] < _MOSAIC_JAX:
        return f"JAX must be at least 0.11, got {jax.__version__}"
    return None
