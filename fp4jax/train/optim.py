"""AdamW and its learning-rate schedules."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

Schedule = Literal["wsd", "cosine", "constant"]
MomentDtype = Literal["float32", "bfloat16"]

# A moment m moves by (1 - b) (target - m), or not at all if that rounds to nothing: if
# it is less than half of the distance of two bfloat16, which is at most 2^-7 m. So it
# rests within 2^-8 / (1 - b) of the target; here, within an eighth.
_LARGEST_BFLOAT16_B = 1 - 2**-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with clipping; warmup and decay are fractions of the run.

    Attributes:
      lr: peak learning rate.
      schedule: after the warmup, "wsd" (stable, then linear decay over the last `decay`
        of the run), "cosine" (half a cosine over the rest of it) or "constant".
      final_lr: where "wsd" and "cosine" end, as a fraction of `lr`.
      weight_decay: decoupled, of the matrices of linear layers and of an untied head;
        norms and embeddings are not decayed.
      clip_norm: largest global norm of the gradient.
      moment_dtype: of both moments between steps, each updated in float32 and rounded
        to nearest. In "bfloat16" they take 4 bytes a parameter in place of 8, and under
        a steady gradient come to rest within 2^-8 / (1 - b) of their value, relatively,
        8% for the b2 of 0.95. b1 and b2 must then be at most 1 - 2^-5.

    Raises:
      ValueError: a value outside its range or not finite, an unknown schedule or dtype,
        or a moment that its dtype cannot hold.
    """

    lr: float = 3e-3
    schedule: Schedule = "wsd"
    warmup: float = 0.05
    decay: float = 0.2
    final_lr: float = 0.0
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    moment_dtype: MomentDtype = "float32"

    def __post_init__(self):
        names = {"schedule": get_args(Schedule), "moment_dtype": get_args(MomentDtype)}
        for name, allowed in names.items():
            is_known = getattr(self, name) in allowed
            self._require(name, is_known, f"be one of {', '.join(allowed)}")
        for name, value in vars(self).items():
            if name not in names:
                is_finite = not isinstance(value, bool) and math.isfinite(value)
                self._require(name, is_finite, "be a finite number")
        for name in ("lr", "eps", "clip_norm"):
            self._require(name, getattr(self, name) > 0, "be positive")
        for name in ("b1", "b2"):
            self._require(name, 0 <= getattr(self, name) < 1, "lie in [0, 1)")
        for name in ("warmup", "decay", "final_lr"):
            self._require(name, 0 <= getattr(self, name) <= 1, "lie in [0, 1]")
        self._require("weight_decay", self.weight_decay >= 0, "not be negative")
        if self.moment_dtype == "bfloat16":
            for name in ("b1", "b2"):
                falls = getattr(self, name) <= _LARGEST_BFLOAT16_B
                least = "be at most 1 - 2^-5 with moment_dtype='bfloat16'"
                self._require(name, falls, least)
        if self.schedule == "wsd":
            fits = self.warmup + self.decay <= 1
            self._require("decay", fits, f"be at most 1 - warmup = {1 - self.warmup}")

    def _require(self, name: str, holds: bool, condition: str):
        if not holds:
            raise ValueError(
                f"OptimConfig: {name} must {condition}, "
                f"got {name}={getattr(self, name)!r}."
            )


class Optimizer(NamedTuple):
    """A gradient transformation and the schedule of its learning rate."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule


def make_schedule(config: OptimConfig, *, steps: int) -> optax.Schedule:
    """Returns the learning rate of each step, 0-based, of a run of `steps`.

    The warmup of w steps gives lr / w, 2 lr / w, ..., lr, so that no step is wasted at
    zero; a decay of d steps from s starts at lr and would reach its end at s + d.

    Args:
      config: peak, shape, fractions.
      steps: length of the run.

    Raises:
      ValueError: `steps` is not positive.
    """
    if steps < 1:
        raise ValueError(f"make_schedule: steps must be positive, got steps={steps}.")
    peak, final = config.lr, config.lr * config.final_lr
    warmup = max(1, round(config.warmup * steps))
    rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    match config.schedule:
        case "constant":
            start, fall = steps, optax.constant_schedule(peak)
        case "wsd":
            decay = max(1, round(config.decay * steps))
            start, fall = steps - decay, optax.linear_schedule(peak, final, decay)
        case "cosine":
            start, decay = warmup, max(1, steps - warmup)
            fall = optax.cosine_decay_schedule(peak, decay, alpha=config.final_lr)
    stable = optax.constant_schedule(peak)
    return optax.join_schedules([rise, stable, fall], [warmup, start])


def make_optimizer(config: OptimConfig, *, steps: int) -> Optimizer:
    """Returns AdamW after clipping by the global norm, and its schedule.

    g' = g min(1, clip_norm / ||g||),  p -= lr (m / (sqrt(v) + eps) + weight_decay p)

    m and v are the means of g' and g'^2, without the bias of their start.

    Args:
      config: of both.
      steps: length of the run.

    Raises:
      ValueError: `steps` is not positive.
    """
    schedule = make_schedule(config, steps=steps)
    adamw = optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if config.moment_dtype != "float32":
        adamw = _rounded_moments(adamw, jnp.dtype(config.moment_dtype))
    clip = optax.clip_by_global_norm(config.clip_norm)
    return Optimizer(optax.chain(clip, adamw), schedule)


def _rounded_moments(
    adam: optax.GradientTransformation, dtype: jax.typing.DTypeLike
) -> optax.GradientTransformation:
    """Returns the same, whose state keeps both moments rounded to a dtype.

    `mu_dtype` of optax is of the first alone.
    """

    def cast(state: optax.OptState, dtype: jax.typing.DTypeLike) -> optax.OptState:
        moments = {
            name: optax.tree.cast(optax.tree.get(state, name), dtype)
            for name in ("mu", "nu")
        }
        return optax.tree.set(state, **moments)

    def init(params: optax.Params) -> optax.OptState:
        return cast(adam.init(params), dtype)

    def update(updates, state, params=None):
        updates, state = adam.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def decay_mask(params: optax.Params) -> Any:
    """Marks the kernels: the stack of a norm's scales has two axes, but is no matrix.

    Embeddings are left out: a row sees a gradient only when its token occurs, and decay
    would wear down the rare ones in between.
    """

    def is_kernel(path, _):
        return any(getattr(entry, "key", None) == "kernel" for entry in path)

    return jax.tree_util.tree_map_with_path(is_kernel, params)
