"""Checkpoints: the whole state of a run, written whole or not at all, read with care.

A checkpoint is a folder named by its step, with the arrays of a `TrainState` by name,
and a note of what the run is. Every array has a checksum that does not depend on how
it is sharded, so that a run may go on upon other devices, and damage is found.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from fp4jax.train.arrays import inspect, put_together, take_apart
from fp4jax.train.state import TrainState

_log = logging.getLogger(__name__)
_FORMAT = 1
_DAMAGED = "damaged-"  # what a checkpoint that cannot be read is renamed to
_READ_ONLY = ocp.CheckpointManagerOptions(
    read_only=True, create=False, save_interval_steps=0
)

Note = dict[str, Any]


class Restored(NamedTuple):
    """A state that was read back, and what was noted beside it."""

    state: TrainState
    data: Note


class Checkpoints:
    """The checkpoints of one run, in a folder of their own.

    Arrays are copied when `save` is called and written while training goes on. A
    checkpoint that could not be written, on a full disk for instance, is logged as an
    error and counted in `failures`; training goes on, and the ones before it stay.

    Args:
      folder: made if need be.
      config: what the run is, as JSON has it. A checkpoint of another config is never
        read.
      keep_last: how many of the newest to keep.
      keep_every: also keeps those whose step is a multiple of it, for good.
      read_only: writes, renames and removes nothing, so that another process may go on
        with the run meanwhile.

    Raises:
      ValueError: `keep_last` or `keep_every` is not positive.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> import optax
      >>> from fp4jax.train import make_state
      >>> _, state = make_state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1))
      >>> with Checkpoints(tempfile.mkdtemp(), config={"lr": 0.1}) as checkpoints:
      ...     _ = checkpoints.save(state, data={"next": 0})
      ...     checkpoints.wait()
      ...     checkpoints.restore(state).data
      {'next': 0}
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        config: Mapping[str, Any],
        keep_last: int = 2,
        keep_every: int | None = None,
        read_only: bool = False,
    ):
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(
                    f"Checkpoints: {name} must be positive, got {name}={value}."
                )
        self.failures = 0
        self._folder = Path(folder).absolute()
        # As it reads when it comes back: JSON has lists for tuples.
        self._config = json.loads(json.dumps(config))
        self._read_only = read_only
        self._options = (
            _READ_ONLY
            if read_only
            else ocp.CheckpointManagerOptions(
                max_to_keep=keep_last,
                keep_period=keep_every,
                cleanup_tmp_directories=True,
                step_prefix=None,
            )
        )
        self._opened: ocp.CheckpointManager | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def steps(self) -> Sequence[int]:
        """The steps there are, from the first to the last."""
        if not self._folder.is_dir():
            return []
        return sorted(self._manager.all_steps())

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._opened is not None and self._opened.is_saving_in_progress()

    def save(self, state: TrainState, *, data: Mapping[str, Any]) -> bool:
        """Begins to write a state, unless its step is there already.

        Args:
          state: may be consumed by the next training step.
          data: of the batches that follow, as JSON has it.

        Returns:
          Whether the state is finite and its writing began.

        Raises:
          ValueError: the checkpoints are read only.
        """
        if self._read_only:
            raise ValueError(
                "save: checkpoints must be opened to write, got read_only=True."
            )
        self.wait()  # or a failure of the one before would count as one of this
        step = int(state.step)
        arrays = take_apart(state)
        sums, finite = jax.device_get(inspect(arrays))
        broken = [name for name, is_finite in finite.items() if not is_finite]
        if broken:
            _log.error(
                "The state of step %d is not saved: not finite in %s.",
                step,
                ", ".join(broken),
            )
            self.failures += 1
            return False
        note = {
            "format": _FORMAT,
            "config": self._config,
            "config_hash": hash_of(self._config),
            "data": dict(data),
            "checksums": {name: int(value) for name, value in sums.items()},
        }
        note["note_hash"] = hash_of(note)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays), note=ocp.args.JsonSave(note)
        )

        def begin() -> None:
            newest = self._manager.latest_step()
            if step not in self._manager.all_steps() and not self._manager.save(
                step, args=args
            ):
                raise ValueError(f"step {step} comes before the newest, {newest}")

        return self._try(begin)

    def wait(self) -> None:
        """Waits until all that was saved is on disk."""
        if self._opened is not None:
            self._try(self._opened.wait_until_finished)

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        self.wait()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def restore(self, like: TrainState, *, step: int | None = None) -> Restored | None:
        """Returns the newest state that can be read; None where there never was one.

        A checkpoint that is truncated or corrupted is renamed, unless these are read
        only, and the one before it is read instead; the log says so.

        Args:
          like: of the same run, made anew: tells the names of arrays, their shapes, and
            the devices that they are put on.
          step: the only one to read; None reads the newest.

        Raises:
          ValueError: no checkpoint of such a step; a checkpoint of another config, with
            the fields that differ; or checkpoints of which none can be read.
        """
        steps = _chosen(self.steps, step, self._folder)
        damaged: list[int] = []
        for number in reversed(steps):
            found, message = None, "in another process"
            try:
                found = self._read(number, like)
            except _OtherConfig:
                raise
            except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
                raise  # says nothing of the checkpoint
            except Exception as error:  # whatever the libraries below make of damage
                message = _first_line(error)
            if _everywhere(found is not None):
                # Only where an older one can be read is the fault that of the newer.
                for each in damaged:
                    self._set_aside(each)
                return found
            _log.error("The checkpoint of step %d cannot be read: %s", number, message)
            damaged.append(number)
            self.close()
        aside = list(self._folder.glob(f"{_DAMAGED}*"))
        if damaged or aside:
            raise ValueError(
                "Checkpoints: folder must hold one that can be read, got "
                f"{len(damaged) + len(aside)} that are damaged in {self._folder}. "
                "Remove it to begin anew."
            )
        return None

    def _read(self, step: int, like: TrainState) -> Restored:
        note = self._part(step, note=ocp.args.JsonRestore())
        if note.pop("note_hash", None) not in (None, hash_of(note)):
            raise ValueError("checksum of the note")
        if note["format"] != _FORMAT:
            raise _OtherConfig(
                f"Checkpoints: format must be {_FORMAT}, got {note['format']} at "
                f"{self._folder / str(step)}. Read it by the version that wrote it."
            )
        if differences := config_differences(note["config"], self._config):
            raise _OtherConfig(
                "Checkpoints: config must be that of the checkpoint at "
                f"{self._folder / str(step)}, which has "
                f"{'; '.join(differences)}. Use the same, or another folder."
            )
        target = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in take_apart(like).items()
        }
        arrays = self._part(step, state=ocp.args.StandardRestore(target))
        sums, _ = jax.device_get(inspect(arrays))
        wrong = [n for n, value in sums.items() if note["checksums"].get(n) != value]
        if wrong:
            raise ValueError(f"checksum of {', '.join(wrong)}")
        return Restored(put_together(arrays, like), note["data"])

    def _part(self, step: int, **args: Any) -> Any:
        """Returns one part of a checkpoint, which the name of the argument is."""
        found = self._manager.restore(step, args=ocp.args.Composite(**args))
        return found[next(iter(args))]

    def _set_aside(self, step: int) -> None:
        self.close()
        if self._read_only:
            return
        name = f"{_DAMAGED}{step}"
        _log.error("The checkpoint of step %d is set aside as %s.", step, name)
        if jax.process_index() == 0:
            source = self._folder / str(step)
            if source.exists():
                source.rename(_unused(self._folder / name))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside {step}")

    def _try(self, write: Callable[[], None]) -> bool:
        """Returns whether writing went well, in all processes; else begins anew."""
        message = "in another process"
        try:
            write()
            went_well = True
        except Exception as error:  # of the file system, in whatever wrapping
            message, went_well = _first_line(error), False
        if _everywhere(went_well):
            return True
        self.failures += 1
        _log.error("A checkpoint is not written: %s", message)
        manager, self._opened = self._opened, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:
                _log.debug("%s", error)
        return False

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """The manager; a new one after a failure, which removes what it has left."""
        if self._opened is None:
            if not self._read_only:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._opened = ocp.CheckpointManager(self._folder, options=self._options)
        return self._opened


class _OtherConfig(ValueError):
    pass


def _everywhere(holds: bool) -> bool:
    """Returns whether something holds in all processes, which all ask together."""
    if jax.process_count() == 1:
        return holds
    return bool(multihost_utils.process_allgather(np.int32(holds)).min())


def read_config(folder: Path | str, *, step: int | None = None) -> Note:
    """Returns the config that the newest checkpoint of a folder was saved with.

    With it `Checkpoints(folder, config=..., read_only=True)` reads a run of which
    nothing else is known. Nothing in the folder changes.

    Args:
      folder: of the checkpoints of one run.
      step: the only checkpoint to read; None reads the newest whose note is whole.

    Raises:
      ValueError: no such checkpoint, or none with a note that can be read.
    """
    with Checkpoints(folder, config={}, read_only=True) as checkpoints:
        steps = _chosen(checkpoints.steps, step, Path(folder))
        for number in reversed(steps):
            try:
                return checkpoints._part(number, note=ocp.args.JsonRestore())["config"]
            except Exception as error:  # as in `restore`
                _log.error(
                    "The note of step %d cannot be read: %s", number, _first_line(error)
                )
    raise ValueError(
        "read_config: folder must hold a checkpoint that can be read, got "
        f"{f'damaged ones of steps {steps}' if steps else 'none'} in {str(folder)!r}."
    )


def _chosen(steps: Sequence[int], step: int | None, folder: Path) -> Sequence[int]:
    """Returns all steps, or the one that is asked for."""
    if step is None:
        return steps
    if step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise ValueError(
            f"Checkpoints: step must be one of {found} in {folder}, got step={step}."
        )
    return [step]


def hash_of(config: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of nested JSON, names sorted."""
    text = json.dumps(config, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def config_differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Returns each field of nested JSON that differs: `model.d_ff=512, not 256`.

    Example:
      >>> config_differences({"model": {"d_ff": 512}}, {"model": {"d_ff": 256}})
      ['model.d_ff=512, not 256']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        prefix = f"{path}." if path else ""
        return [
            difference
            for name in names
            for difference in config_differences(
                old.get(name), new.get(name), f"{prefix}{name}"
            )
        ]
    return [] if old == new else [f"{path}={_short(old)}, not {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _unused(path: Path) -> Path:
    """Returns the path, or with a number where something has its name."""
    candidate, number = path, 1
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}.{number}"), number + 1
    return candidate
