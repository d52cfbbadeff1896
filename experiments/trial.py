"""One run of a policy: built, gone on with, trained, saved, evaluated."""

import contextlib
import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from experiments import heldout, presets
from experiments.folder import Folder, Row, identity, number
from experiments.presets import ExperimentConfig
from experiments.profiling import Profile, Tracer
from experiments.report import Trial
from experiments.stop import Stop
from fp4jax import data, models, sharding, train
from fp4jax.data import Corpus
from fp4jax.policies import Policy, Schedule
from fp4jax.train import Checkpoints, TrainState

_log = logging.getLogger(__name__)

HAND_OVER = 10  # steps between two looks at the device


class Stopped(Exception):
    """A signal has ended a run; its state is saved."""


class Program(NamedTuple):
    """What the phases of runs compile."""

    step: Callable
    evaluate: Callable
    diagnose: Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """What all runs of a comparison have in common.

    Attributes:
      description: from `experiments.record.describe`.
      stop: asked whether to stop.
      mesh: that the rows of batches are spread over; None for one device.
      profile: which steps to trace, of the first seed.
    """

    config: ExperimentConfig
    corpus: Corpus
    folder: Folder
    description: Mapping[str, Any]
    stop: Stop
    mesh: Mesh | None = None
    profile: Profile | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Shared):
    """A policy, a seed, and all that it takes to train under them."""

    policy: str
    seed: int

    def __call__(self) -> Trial:
        """Returns the result, which an earlier command may have found.

        Raises:
          Stopped: a signal came.
        """
        row = self.folder.finished(self.policy, self.seed)
        if row is None:
            if self.stop():
                raise Stopped
            row = self._train()
            self.folder.finish(row)
        records = self.folder.rows("metrics.jsonl", self.policy, self.seed)
        losses = {r["step"]: None if r["skipped"] else r["loss"] for r in records}
        steps = range(1, self.config.run.steps + 1)
        speeds = [r["tokens_per_s"] for r in records if r["tokens_per_s"] is not None]
        return Trial(
            name=self.policy,
            seed=self.seed,
            heldout_loss=number(row["heldout_loss"]),
            bits_per_byte=number(row["bits_per_byte"]),
            losses=tuple(number(losses.get(step)) for step in steps),
            tokens_per_s=statistics.harmonic_mean(speeds) if speeds else None,
        )

    def _train(self) -> Row:
        """Trains to the end; a run that diverges has no losses from there on."""
        config = self.config
        schedule = Schedule.of(presets.schedule(config, self.policy))
        optimizer = train.make_optimizer(config.optim, steps=config.run.steps)

        def make_model() -> models.Transformer:
            return models.Transformer(config.model, schedule, rngs=nnx.Rngs(self.seed))

        model = nnx.eval_shape(make_model)
        state = train.init_state(make_model, optimizer.transform, mesh=self.mesh)

        def program(phase: Policy) -> Program:
            model.set_policy(phase)
            return compiled(nnx.graphdef(model), config, self.mesh)

        batches = batches_of(self.corpus, config, self.seed, shard=self._rows)
        result: Row = {"policy": self.policy, "seed": self.seed}
        result |= dict.fromkeys(("heldout_loss", "bits_per_byte", "stopped_by"))
        with self._checkpoints() as checkpoints:
            state = start = self._restored(checkpoints, state, batches)
            last = program(schedule.at(config.run.steps - 1))
            try:
                follow = self._follow(schedule, program, start, batches)
                with contextlib.closing(follow) as states:
                    for state in states:
                        step, stopping = int(state.step), self.stop()
                        if step in multiples(config.run.eval_every):
                            found = self._evaluate(last, state)
                            self._write("evaluations.jsonl", {"step": step} | found)
                        due = step in multiples(config.checkpoint.every)
                        if due or stopping or step == config.run.steps:
                            checkpoints.save(state, data=batches.get_state())
                        if stopping:
                            raise Stopped
                result |= self._evaluate(last, state)
            except train.Diverged as error:
                _log.error("%s, seed %d: %s", self.policy, self.seed, error)
                result["stopped_by"] = str(error)
            checkpoints.wait()
            return result | {"failed_checkpoints": checkpoints.failures}

    def _follow(
        self,
        schedule: Schedule,
        program: Callable[[Policy], Program],
        state: TrainState,
        batches: data.Batches,
    ) -> Generator[TrainState]:
        """Yields the state at every hand-over; logs and shows the steps."""
        config, guard = self.config, self.config.guard
        every = (HAND_OVER, config.checkpoint.every, config.run.eval_every)
        spikes = train.SpikeDetector(window=guard.window, sigmas=guard.sigmas)
        for record in self.folder.rows("metrics.jsonl", self.policy, self.seed):
            spikes.update(number(record["loss"]))
        is_first = self.seed == config.run.seed
        tracer = Tracer(self.profile if is_first else None, self.policy)
        runs = train.train_phases(
            lambda phase: tracer(program(phase).step),
            schedule,
            state,
            map(self._place, batches),
            steps=config.run.steps,
            flops_per_token=models.flops_per_token(
                config.model, sequence_length=config.data.sequence_length
            ),
            every=tuple(n for n in every if n),
            max_skips=guard.max_skips,
            # Several processes agree at hand-overs only.
            stop=self.stop if jax.process_count() == 1 else lambda: False,
            diagnose=lambda state, batch: program(
                schedule.at(int(state.step) - 1)
            ).diagnose(state, batch),
        )
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        label = f"{self.policy}, seed {self.seed}"
        progress = train.Progress(label, steps=config.run.steps, console=console)

        def log(records: Sequence[Row]) -> None:
            for record in records:
                self._watch(record, is_spike=spikes.update(record["loss"]))
                self._write("metrics.jsonl", record)
            shown.update(records)

        with tracer, progress as shown:
            try:
                for state, records in runs:
                    log(records)
                    yield state
            except train.Diverged as error:
                log(error.records)
                raise

    def _watch(self, record: Row, *, is_spike: bool) -> None:
        """Marks and reports a step that was skipped, or whose loss is a spike."""
        record["spike"] = is_spike
        if record["skipped"] or is_spike:
            _log.warning(
                "%s, seed %d: step %d %s (loss %.4f, gradient norm %.3g).",
                self.policy,
                self.seed,
                record["step"],
                "is skipped, as it is not finite" if record["skipped"] else "spikes",
                record["loss"],
                record["grad_norm"],
            )

    def _evaluate(self, program: Program, state: TrainState) -> Row:
        """Returns the held-out loss, of all domains and of each."""
        found = heldout.evaluate(
            program.evaluate,
            state,
            self.corpus,
            self.config.data,
            place=self._place_whole,
        )
        row = losses(train.Evaluation.sum(found.values()))
        if len(found) > 1:
            row["domains"] = {name: losses(each) for name, each in found.items()}
        return row

    def _checkpoints(self) -> Checkpoints:
        settings = self.config.checkpoint
        return Checkpoints(
            self.folder.checkpoints(self.policy, self.seed),
            config=identity(self.description)
            | {"policy": self.policy, "seed": self.seed},
            keep_last=settings.keep_last,
            keep_every=settings.keep_every or None,
        )

    def _restored(
        self,
        checkpoints: Checkpoints,
        state: TrainState,
        batches: data.Batches,
    ) -> TrainState:
        """Returns the newest state that was saved, and sets the batches after it."""
        found = checkpoints.restore(state)
        step = 0 if found is None else int(found.state.step)
        self.folder.rewind(self.policy, self.seed, step=step)
        if found is None:
            return state
        batches.set_state(found.data)
        _log.warning("%s, seed %d goes on after step %d.", self.policy, self.seed, step)
        rows = self.folder.rows("metrics.jsonl", self.policy, self.seed)
        if lost := step - sum(row["step"] <= step for row in rows):
            _log.error(
                "%s, seed %d: metrics.jsonl lacks %d of the steps before, which the "
                "report leaves out.",
                self.policy,
                self.seed,
                lost,
            )
        return found.state

    def _write(self, name: str, row: Row) -> None:
        self.folder.write(name, {"policy": self.policy, "seed": self.seed, **row})

    @property
    def _rows(self) -> tuple[int, int]:
        """Which of how many equal parts of the rows this process has."""
        return (0, 1) if self.mesh is None else sharding.process_rows(self.mesh)

    def _place(self, batch: train.Batch) -> train.Batch:
        """Puts the rows of this process on its devices."""
        return batch if self.mesh is None else sharding.shard_rows(batch, self.mesh)

    def _place_whole(self, batch: train.Batch) -> train.Batch:
        """Puts a batch that every process has whole on the devices."""
        rows, (index, count) = len(batch["inputs"]), self._rows
        first = index * rows // count
        mine = slice(first, first + rows // count)
        return self._place({name: value[mine] for name, value in batch.items()})


def batches_of(
    corpus: Corpus,
    config: ExperimentConfig,
    seed: int,
    *,
    shard: tuple[int, int] = (0, 1),
) -> data.Batches:
    """Returns what every policy trains on with a seed, without end.

    Args:
      corpus: of the experiment.
      config: of the experiment.
      seed: of the run.
      shard: which of how many equal parts of the rows.
    """
    drawn = dataclasses.replace(config.data, seed=config.data.seed + seed)
    return data.train_batches(corpus, drawn, shard=shard)


def losses(evaluation: train.Evaluation) -> Row:
    """Returns an evaluation as logs have it."""
    return {
        "heldout_loss": evaluation.nats_per_token,
        "bits_per_byte": evaluation.bits_per_byte,
    }


def multiples(period: int) -> range:
    """Returns the positive multiples of a period; none of 0."""
    return range(period, 2**62, period) if period else range(0)


@functools.lru_cache(maxsize=2)
def compiled(
    graph: nnx.GraphDef, config: ExperimentConfig, mesh: Mesh | None
) -> Program:
    """Returns the programs of a phase, which compile once for all seeds of a policy."""
    optimizer = train.make_optimizer(config.optim, steps=config.run.steps)
    return Program(
        step=train.make_train_step(
            graph, optimizer, microbatches=config.run.microbatches, mesh=mesh
        ),
        evaluate=train.make_eval_step(graph, mesh=mesh),
        diagnose=train.make_diagnosis(graph, config.model, mesh=mesh),
    )
