"""What watches over a run: spikes of the loss, and where a step was not finite."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fp4jax import taps
from fp4jax.models import ModelConfig, Transformer
from fp4jax.nnx import set_step
from fp4jax.sharding import Compiled
from fp4jax.train.losses import Batch, token_losses
from fp4jax.train.state import TrainState

_MAD_TO_SIGMA = 1.4826  # of a normal distribution


class SpikeDetector:
    """Tells losses that leave the noise of those before them.

    loss > median + sigmas 1.4826 median|loss - median|,  over the last `window` losses

    Medians, so that one spike does not hide the next. Losses that are not finite are
    spikes and do not enter the window.

    Args:
      window: number of losses; there is no spike before it is full.
      sigmas: how far from the median, in standard deviations of normal noise.

    Raises:
      ValueError: one of them is not positive.

    Example:
      >>> detector = SpikeDetector(window=4, sigmas=6)
      >>> [detector.update(loss) for loss in (3.0, 3.1, 2.9, 3.0, 9.0, 3.0)]
      [False, False, False, False, True, False]
    """

    def __init__(self, *, window: int = 128, sigmas: float = 8.0):
        for name, value in (("window", window), ("sigmas", sigmas)):
            if not value > 0:
                raise ValueError(
                    f"SpikeDetector: {name} must be positive, got {name}={value}."
                )
        self._losses: deque[float] = deque(maxlen=window)
        self._sigmas = sigmas

    def update(self, loss: float) -> bool:
        """Returns whether the next loss is a spike."""
        if not np.isfinite(loss):
            return True
        is_spike = False
        if len(self._losses) == self._losses.maxlen:
            median = statistics.median(self._losses)
            spread = statistics.median(abs(x - median) for x in self._losses)
            is_spike = loss > median + self._sigmas * _MAD_TO_SIGMA * spread
        self._losses.append(loss)
        return is_spike


def make_diagnosis(
    graph: nnx.GraphDef, config: ModelConfig, *, mesh: Mesh | None = None
) -> Callable[[TrainState, Batch], str]:
    """Returns a function that names where the newest step stopped being finite.

    It repeats the step, recording the operands of all GEMMs, in the memory of a step
    without rematerialization or microbatches. The forward pass is searched from its
    first layer on, and then the backward pass from the last one back.

    Args:
      graph: of a `fp4jax.models.Transformer`, from `make_state`.
      config: the model's.
      mesh: that the state is spread over.

    Returns:
      A function of the state after a skipped step, whose parameters are those before
      it, and its batch, to one sentence.
    """

    def step_flags(state: TrainState, batch: Batch):
        model = state.model(graph)

        def loss_fn(model, batch):
            set_step(model, state.step - 1)
            total, weight = token_losses(model, batch)
            return total / jnp.maximum(weight, 1)

        (loss, operands), _ = taps.value_and_grad(loss_fn)(model, batch)
        return loss, {path: _are_finite(found) for path, found in operands.items()}

    compiled = Compiled(jax.jit(step_flags), mesh)

    def diagnose(state: TrainState, batch: Batch) -> str:
        for name, tree in (("batch", batch), ("parameters", state.params)):
            if broken := _not_finite(tree):
                return f"Not finite in the {name}: {broken}."
        model = state.model(graph)
        loss, flags = compiled(state, batch)
        found: dict[str, dict[str, bool]] = {}
        for path, of_layers in jax.device_get(flags).items():
            found |= _by_block(path, of_layers, model)
        return _first(found, config.layer_paths, float(loss))

    return diagnose


def _are_finite(operands: taps.Operands) -> dict[str, jax.Array]:
    """Returns for each operand a boolean for every layer of the stack."""

    def per_layer(x: jax.Array) -> jax.Array:
        return jnp.isfinite(x).all(axis=tuple(range(operands.stack, x.ndim)))

    return {name: per_layer(getattr(operands, name)) for name in ("x", "w", "dy")}


def _by_block(
    path: str, flags: Mapping[str, np.ndarray], model: Transformer
) -> dict[str, dict[str, bool]]:
    """Returns the flags of every layer of a stack by its path in the whole model."""
    _, index, rest = path.split("/", 2)
    return {
        f"blocks/{block}/{rest}": {name: bool(each[i]) for name, each in flags.items()}
        for i, block in enumerate(model.places[int(index)])
    }


def _first(
    found: Mapping[str, Mapping[str, bool]], paths: Sequence[str], loss: float
) -> str:
    """Returns the first place of a step whose operand is not finite."""
    for path in paths:
        for operand in ("x", "w"):
            if not found[path][operand]:
                return f"First not finite: fprop {operand} of {path}."
    if not np.isfinite(loss):
        return "Every operand of fprop is finite: the loss itself is not."
    for path in reversed(paths):
        if not found[path]["dy"]:
            return f"First not finite: dgrad dy of {path}."
    return "Every operand is finite: a gradient itself is not."


def _not_finite(tree: Any) -> str:
    """Returns the names of the arrays of a tree that hold NaN or an infinity."""
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return ", ".join(
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in named
        if not jnp.isfinite(x).all()
    )
