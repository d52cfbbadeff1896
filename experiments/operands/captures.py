"""Operands of a model in training, kept on disk for the studies that quantize them.

early, middle and late step of a BF16 run -> x, w, dy of every linear layer
"""

import dataclasses
import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import pretrain
from experiments.presets import REFERENCE
from experiments.saved import BF16, RunFolder, Saved
from fp4jax import Operands, data, models, taps
from fp4jax.nnx import set_step
from fp4jax.train import compiler_options
from fp4jax.train.losses import token_losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A training run in BF16, and what is captured of it.

    Attributes:
      folder: of the run and of the captures.
      model: name of a preset without experts.
      steps: so many steps are done when a step is captured.
      length_of_run: steps of the run, which its learning rate follows.
      rows, length: of a batch.
      tokens: of the step, the first ones, whose x and dy are kept.
      settings: further ones of the run, such as "model.num_layers=2".
    """

    folder: Path = Path("runs/operands")
    model: str = "dense_10m"
    steps: tuple[int, ...] = (100, 300, 600)
    length_of_run: int = 800
    rows: int = 16
    length: int = 128
    tokens: int = 256
    settings: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path | None, *, tiny: bool) -> "Source":
        """Returns the run of the studies, or the very small one, in a folder."""
        found = TINY if tiny else cls()
        return found if folder is None else dataclasses.replace(found, folder=folder)

    @property
    def flags(self) -> list[str]:
        """What `experiments.pretrain` makes the run with, and goes on with it."""
        every = math.gcd(*self.steps)
        settings = (
            f"data.batch_size={self.rows}",
            f"data.sequence_length={self.length}",
            f"checkpoint.every={every}",
            f"checkpoint.keep_every={every}",
            *self.settings,
        )
        return [
            *("--model", self.model, "--policies", REFERENCE, "--alone"),
            *("--steps", str(self.length_of_run)),
            *(flag for setting in settings for flag in ("--set", setting)),
            *("--out", str(self.folder), "--resume", "auto"),
        ]

    def path(self, step: int) -> Path:
        """Returns the file of a capture."""
        return self.folder / "captures" / f"{step}.npz"


TINY = Source(
    folder=Path("runs/operands-tiny"),
    model="tiny",
    steps=(1, 2),
    length_of_run=2,
    rows=2,
    length=32,
    tokens=64,
    settings=("model.num_layers=2", "model.d_model=64", "model.d_ff=64"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """The operands of a step.

    Attributes:
      step: of training, done before.
      loss: of the step, nats/token.
      layers: operands by path, such as "blocks/3/mlp/up", in the order of the forward
        pass: x [m, k], w [k, n] and dy [m, n], of all of which x and dy are in the
        BF16 that arrives at the products, as float32.
    """

    step: int
    loss: float
    layers: dict[str, Operands]


def train(source: Source) -> None:
    """Trains the run to its end, from where it stopped.

    Raises:
      SystemExit: it did not come to its end, and has said why.
    """
    if all(source.path(step).exists() for step in source.steps):
        return
    if status := pretrain.main(source.flags):
        sys.exit(status)


def capture(source: Source, step: int) -> Capture:
    """Returns the operands of a step, which an earlier call may have kept."""
    path = source.path(step)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        # Of this process: two studies may be at it.
        partial = path.with_name(f".{os.getpid()}-{path.name}")
        np.savez(partial, **_arrays(_captured(source, step)))
        partial.replace(path)
    with np.load(path) as file:
        arrays = {name: jnp.asarray(_plain(file[name])) for name in file}
    paths = dict.fromkeys(name.rpartition("/")[0] for name in arrays if "/" in name)
    layers = {
        path: Operands(arrays[f"{path}/x"], arrays[f"{path}/w"], arrays[f"{path}/dy"])
        for path in paths
    }
    return Capture(step=step, loss=float(arrays["loss"]), layers=layers)


def _captured(source: Source, step: int) -> Capture:
    """Repeats a step of the run and records what its products multiply."""
    saved = Saved.read(source.folder / "checkpoints" / f"{REFERENCE}-0", step=step)
    config = RunFolder.of(source.folder).data
    batches = data.train_batches(data.load_corpus(config), config)
    graph, model = saved.graph(BF16), saved.model

    def operands(state: Any, batch: Any):
        def loss_fn(model: models.Transformer, batch: Any) -> jax.Array:
            set_step(model, state.step)
            total, weight = token_losses(model, batch)
            return total / jnp.maximum(weight, 1)

        merged = state.model(graph)
        (loss, found), _ = taps.value_and_grad(loss_fn)(merged, batch)
        return loss, found

    compiled = jax.jit(operands, compiler_options=compiler_options(graph))
    loss, found = compiled(saved.state, next(itertools.islice(batches, step, None)))
    layers = {}
    for path, stack in found.items():
        _, run, rest = path.split("/", 2)
        for i, block in enumerate(model.places[int(run)]):
            layers[f"blocks/{block}/{rest}"] = Operands(
                stack.x[i, : source.tokens], stack.w[i], stack.dy[i, : source.tokens]
            )
    ordered = {path: layers[path] for path in model.config.layer_paths}
    return Capture(step=step, loss=float(loss), layers=ordered)


def _arrays(found: Capture) -> dict[str, Any]:
    """Returns a capture as named arrays."""
    named: dict[str, Any] = {"loss": np.float32(found.loss)}
    for path, operands in found.layers.items():
        for name in ("x", "w", "dy"):
            named[f"{path}/{name}"] = np.asarray(getattr(operands, name))
    return named


def _plain(x: np.ndarray) -> np.ndarray:
    """Returns an array of a file as float32; numpy reads bfloat16 as bytes."""
    return (x.view(jnp.bfloat16) if x.dtype.kind == "V" else x).astype(np.float32)
