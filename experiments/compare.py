"""Trains a model on the same batches under several policies, and n-grams beside it."""

import dataclasses
import functools
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from experiments import ngram, presets
from experiments.presets import ExperimentConfig
from experiments.report import Baseline, Trial
from fp4jax import data, models, train
from fp4jax.data import Corpus
from fp4jax.policies import Policy, Schedule
from fp4jax.train import TrainState

ORDERS = (2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What all runs share.

    Attributes:
      log: gets a record of every training step.
    """

    config: ExperimentConfig
    corpus: Corpus
    log: train.JsonLines

    @property
    def seeds(self) -> range:
        """One for each run of a policy."""
        run = self.config.run
        return range(run.seed, run.seed + run.seeds)

    def trials(self) -> Iterator[Trial]:
        """Yields the runs of every policy in turn."""
        for policy, seed in itertools.product(self.config.policies, self.seeds):
            yield self.train(policy, seed)

    def baselines(self) -> Iterator[Baseline]:
        """Yields n-gram models, fitted on exactly the batches of each seed."""
        for order, seed in itertools.product(ORDERS, self.seeds):
            vocab_size = self.config.data.vocab_size
            model = ngram.fit(self.batches(seed), order=order, vocab_size=vocab_size)
            loss, bits = ngram.evaluate(
                model, self.heldout(), token_bytes=self.corpus.token_bytes
            )
            name = f"{order}-gram"
            yield Baseline(name=name, seed=seed, heldout_loss=loss, bits_per_byte=bits)

    def batches(self, seed: int) -> Iterator[data.Batch]:
        """Yields what every policy trains on with a seed."""
        config = self.config.data
        drawn = dataclasses.replace(config, seed=config.seed + seed)
        return itertools.islice(
            data.train_batches(self.corpus, drawn), self.config.run.steps
        )

    def heldout(self) -> Iterator[data.Batch]:
        """Yields the held-out text once."""
        return data.heldout_batches(self.corpus, self.config.data)

    def train(self, policy: str, seed: int) -> Trial:
        """Trains and evaluates; a run that diverges has NaN from there on."""
        config, corpus = self.config, self.corpus
        schedule = Schedule.of(presets.schedule(config, policy))
        model = models.Transformer(config.model, schedule, rngs=nnx.Rngs(seed))
        optimizer = train.make_optimizer(config.optim, steps=config.run.steps)
        _, start = train.make_state(model, optimizer.transform)

        def steps_of(phase: Policy) -> tuple[Callable, Callable]:
            model.set_policy(phase)
            graph = nnx.graphdef(model)
            return jitted(
                graph, config.optim, config.run.steps, config.run.microbatches
            )

        losses, speeds, loss, bits = [], [], math.nan, math.nan
        try:
            for state, records in self._follow(schedule, start, steps_of, policy, seed):
                losses += [record["loss"] for record in records]
                speeds += [record["tokens_per_s"] for record in records]
            _, eval_step = steps_of(schedule.at(config.run.steps - 1))
            evaluation = train.evaluate(
                eval_step, state, self.heldout(), token_bytes=corpus.token_bytes
            )
            loss, bits = evaluation.nats_per_token, evaluation.bits_per_byte
        except FloatingPointError as error:
            logging.getLogger(__name__).warning("%s, seed %d: %s", policy, seed, error)
        missing = config.run.steps - len(losses)
        speeds = [speed for speed in speeds if speed is not None]
        return Trial(
            name=policy,
            seed=seed,
            heldout_loss=loss,
            bits_per_byte=bits,
            losses=(*losses, *[math.nan] * missing),
            tokens_per_s=statistics.harmonic_mean(speeds) if speeds else None,
        )

    def _follow(
        self,
        schedule: Schedule,
        start: TrainState,
        steps_of: Callable[[Policy], tuple[Callable, Callable]],
        policy: str,
        seed: int,
    ) -> Iterator[tuple[TrainState, list[dict[str, Any]]]]:
        """Yields what `train.train_phases` does; logs and shows it."""
        config = self.config
        flops_per_token = models.flops_per_token(
            config.model, sequence_length=config.data.sequence_length
        )
        with train.Progress(f"{policy}, seed {seed}", steps=config.run.steps) as shown:
            for state, records in train.train_phases(
                lambda phase: steps_of(phase)[0],
                schedule,
                start,
                self.batches(seed),
                steps=config.run.steps,
                flops_per_token=flops_per_token,
            ):
                for record in records:
                    self.log.write({"policy": policy, "seed": seed, **record})
                shown.update(records)
                yield state, records


@functools.lru_cache(maxsize=2)
def jitted(
    graph: nnx.GraphDef, optim: train.OptimConfig, steps: int, microbatches: int = 1
) -> tuple[Callable, Callable]:
    """Returns both steps of a phase, which compile once for all seeds of a policy."""
    optimizer = train.make_optimizer(optim, steps=steps)
    step = train.make_train_step(graph, optimizer, microbatches=microbatches)
    return step, train.make_eval_step(graph)
