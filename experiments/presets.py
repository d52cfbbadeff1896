"""What an experiment is: one frozen value, and how the command line spells it."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments import named
from fp4jax import models, policies
from fp4jax.data import DataConfig, decided_by_source, is_tokenized
from fp4jax.models import ModelConfig
from fp4jax.policies import Policy, Schedule
from fp4jax.train import OptimConfig

REFERENCE = "bf16"
CONTROL = "int2"

# What trains unless told otherwise.
MODEL = "tiny"
POLICIES = ("bf16", "e2m1_ref", "ufp4")

# What a policy may end in.
FINISHES = ("none", "bf16", "bf16_forward")

# Parts of an experiment whose fields the command line can set.
SECTIONS = ("model", "data", "optim", "run", "guard", "checkpoint")

# Fields that another one determines, and which.
DERIVED = {"model.vocab_size": "data.vocab_size"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long and how often to train.

    Attributes:
      steps: optimizer steps of every run.
      seeds: runs of every policy; run k draws its initial weights, its batches and its
        noise from seed + k, and shares the first two with run k of the other policies.
      seed: of the first run.
      average: last steps, whose mean is the reported training loss.
      microbatches: parts in which a batch is processed, one after another; the gradient
        is that of the batch up to the order of sums, but for amaxes and for the
        auxiliary loss of experts, which are of each part.
      finish: what every policy but the control ends in: "none" for itself, "bf16", or
        "bf16_forward", which keeps its quantized backward pass.
      finish_fraction: of the steps, the last ones, that the finish takes.
      eval_every: steps between two evaluations; 0: at the end only.

    Raises:
      ValueError: a count that is not positive, a negative seed, an unknown finish, or
        a fraction that is not between 0 and 1.
    """

    steps: int = 200
    seeds: int = 1
    seed: int = 0
    average: int = 50
    microbatches: int = 1
    finish: str = "none"
    finish_fraction: float = 0.18
    eval_every: int = 0

    def __post_init__(self):
        _at_least(
            self, steps=1, seeds=1, seed=0, average=1, microbatches=1, eval_every=0
        )
        if self.finish not in FINISHES:
            raise ValueError(
                f"RunConfig: finish must be one of {', '.join(FINISHES)}, got "
                f"finish={self.finish!r}."
            )
        if not 0 < self.finish_fraction < 1:
            raise ValueError(
                "RunConfig: finish_fraction must lie between 0 and 1, got "
                f"finish_fraction={self.finish_fraction}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What becomes of steps that go wrong.

    Attributes:
      max_skips: a step whose loss or gradient is not finite changes nothing; so many in
        a row end the run.
      window: last losses that tell a spike, which is logged.
      sigmas: how far above their median a spike is.

    Raises:
      ValueError: a number that is not positive.
    """

    max_skips: int = 10
    window: int = 128
    sigmas: float = 8.0

    def __post_init__(self):
        _at_least(self, max_skips=1, window=1, sigmas=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run keeps of its states; the last one always.

    Attributes:
      every: steps between two checkpoints; 0: at the end only.
      keep_last: how many of the newest to keep.
      keep_every: also keeps the multiples of it, for good; 0: none.

    Raises:
      ValueError: a negative number, or none of the newest to keep.
    """

    every: int = 1000
    keep_last: int = 2
    keep_every: int = 0

    def __post_init__(self):
        _at_least(self, every=0, keep_last=1, keep_every=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Everything that determines the losses of a comparison, and what it keeps.

    Attributes:
      policies: names as of `named.policy`, in the order they train: the reference
        first and the control last, unless the policies train alone.

    Raises:
      ValueError: a batch that does not divide into the microbatches.
    """

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig
    guard: GuardConfig
    checkpoint: CheckpointConfig
    policies: tuple[str, ...]

    def __post_init__(self):
        if self.data.batch_size % self.run.microbatches:
            raise ValueError(
                "ExperimentConfig: data.batch_size must be a multiple of "
                f"run.microbatches, got data.batch_size={self.data.batch_size}, "
                f"run.microbatches={self.run.microbatches}."
            )


def resolve(
    model: str = MODEL,
    *,
    policy_names: Sequence[str] = POLICIES,
    data: str = DataConfig.source,
    steps: int = RunConfig.steps,
    seeds: int = RunConfig.seeds,
    finish: str = RunConfig.finish,
    finish_fraction: float = RunConfig.finish_fraction,
    alone: bool = False,
    assignments: Sequence[str] = (),
) -> ExperimentConfig:
    """Returns the experiment that the command line describes.

    Args:
      model: name from `fp4jax.models.PRESETS`.
      policy_names: names as of `named.policy`.
      data: "stdlib", or another `DataConfig.source`; what a tokenized folder or a
        tokenizer.json decides is adopted, and no assignment may contradict it.
      steps: of every run.
      seeds: runs of every policy.
      finish: what every policy but the control ends in.
      finish_fraction: of the steps, that the finish takes.
      alone: trains the named policies only, and not the BF16 reference before and the
        control after them.
      assignments: such as "optim.lr=3e-4", applied together after everything else.

    Raises:
      ValueError: an unknown name or path, or a value outside its range.
      TypeError: a value that its field's type cannot hold.
    """
    shape = models.PRESETS[known(model, models.PRESETS, flag="--model")]
    for name in policy_names:
        named.policy(name)
    named.check_file_names(policy_names)
    config = ExperimentConfig(
        model=shape,
        data=DataConfig(source=data, vocab_size=shape.vocab_size),
        optim=OptimConfig(),
        run=RunConfig(
            steps=steps, seeds=seeds, finish=finish, finish_fraction=finish_fraction
        ),
        guard=GuardConfig(),
        checkpoint=CheckpointConfig(),
        policies=tuple(dict.fromkeys(policy_names if alone else _framed(policy_names))),
    )
    config = _adopt(assign(config, assignments), assignments)
    last_seed = config.data.seed + config.run.seed + config.run.seeds - 1
    if last_seed >= 2**32:
        raise ValueError(
            "--set: data.seed + run.seed + run.seeds must be at most 2**32, got "
            f"{last_seed + 1}."
        )
    sized = dataclasses.replace(config.model, vocab_size=config.data.vocab_size)
    return dataclasses.replace(config, model=sized)


def of_batch(
    model: str,
    rows: int,
    length: int,
    *changes: str,
    policy: str = REFERENCE,
) -> ExperimentConfig:
    """Returns the experiment of one policy alone, on batches of a size.

    Args:
      model: as for `resolve`.
      rows: of a batch.
      length: tokens of a row.
      *changes: assignments as for `resolve`.
      policy: likewise.

    Raises:
      ValueError, TypeError: as `resolve`.
    """
    sizes = f"data.batch_size={rows}", f"data.sequence_length={length}"
    return resolve(
        model, policy_names=[policy], alone=True, assignments=[*sizes, *changes]
    )


def schedule(config: ExperimentConfig, policy: str) -> Policy | Schedule:
    """Returns what a run trains under: a policy, or one that ends in the finish."""
    run, whole = config.run, named.policy(policy)(config.model)
    if run.finish == "none" or policy in (REFERENCE, CONTROL):
        return whole
    bf16 = policies.bf16(config.model)
    last = bf16 if run.finish == "bf16" else policies.bf16_forward(whole)
    start = run.steps - max(1, round(run.finish_fraction * run.steps))
    if start < 1:
        raise ValueError(
            "--finish: must leave a step before it, got "
            f"run.steps={run.steps}, run.finish_fraction={run.finish_fraction}."
        )
    return Schedule(((0, whole), (start, last)))


def assign(config: ExperimentConfig, assignments: Sequence[str]) -> ExperimentConfig:
    """Returns the experiment after every `section.field=value`, typed by its field.

    Fields change together, so that values which only fit each other can be given in any
    order; the last value of a field counts. What the model has of its own blocks is
    set as "model.moe.top_k=2".

    Example:
      >>> assign(resolve(), ["optim.lr=3e-4", "data.batch_size=4"]).optim.lr
      0.0003
    """
    values = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set: must read path=value, got {assignment!r}.")
        values[path] = _parse(path, text, settings=settings(config))
    return _replace(config, values)


def settings(config: ExperimentConfig) -> dict[str, bool | int | float | str]:
    """Returns the value at every path that `assign` can set."""
    sections = (_leaves(getattr(config, name), name) for name in SECTIONS)
    found = dict(itertools.chain.from_iterable(sections))
    return {path: value for path, value in found.items() if path not in DERIVED}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a config and of those inside it, by path; not the absent."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif value is not None:
        yield path, value


def _replace(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns a config with other values at some paths, which change together."""
    changes, nested = {}, defaultdict(dict)
    for path, value in values.items():
        name, dot, rest = path.partition(".")
        if dot:
            nested[name][rest] = value
        else:
            changes[name] = value
    for name, inner in nested.items():
        changes[name] = _replace(getattr(config, name), inner)
    return dataclasses.replace(config, **changes)


def _adopt(config: ExperimentConfig, assignments: Sequence[str]) -> ExperimentConfig:
    """Returns the experiment with what its data decides and no assignment sets.

    Raises:
      ValueError: an assignment sets it otherwise.
    """
    assigned = {assignment.partition("=")[0] for assignment in assignments}
    decided = decided_by_source(config.data)
    for name in [name for name in decided if f"data.{name}" in assigned]:
        _check_decided(config.data, name, decided.pop(name))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **decided))


def _check_decided(config: DataConfig, name: str, value: Any) -> None:
    """Raises where a field is not what the data decides; a tokenizer.json a least."""
    found, whole = getattr(config, name), is_tokenized(config.source)
    if found == value or (not whole and found > value):
        return
    raise ValueError(
        f"--set: data.{name} must be {'' if whole else 'at least '}{value!r}, as "
        f"{(config.source if whole else config.tokenizer)!r} has it, got {found!r}. "
        f"Leave out --set data.{name}."
    )


def _framed(names: Sequence[str]) -> list[str]:
    between = [name for name in names if name not in (REFERENCE, CONTROL)]
    return [REFERENCE, *between, CONTROL]


def _at_least(config: Any, **bounds: float) -> None:
    """Raises ValueError where a field of a config is below its bound."""
    for name, least in bounds.items():
        if not (value := getattr(config, name)) >= least:
            raise ValueError(
                f"{type(config).__name__}: {name} must be at least {least}, got "
                f"{name}={value}."
            )


def known(name: str, names: Iterable[str], *, flag: str) -> str:
    """Returns a name, or raises ValueError for what is none of those of an option."""
    if name not in names:
        raise ValueError(f"{flag}: must be one of {', '.join(names)}, got {name!r}.")
    return name


def _parse(path: str, text: str, *, settings: Mapping[str, Any]) -> Any:
    """Returns the text as a value of the type that the setting has."""
    if path in DERIVED:
        raise ValueError(f"--set: {path} follows {DERIVED[path]}; set that instead.")
    if path not in settings:
        section = path.partition(".")[0]
        near = [p for p in settings if p.startswith(f"{section}.")] or settings
        raise ValueError(f"--set: path must be one of {', '.join(near)}, got {path!r}.")
    kind = type(settings[path])
    try:
        return (
            {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        )
    except (ValueError, KeyError):
        wanted = "true or false" if kind is bool else f"of type {kind.__name__}"
        raise TypeError(f"--set {path}: must be {wanted}, got {text!r}.") from None
