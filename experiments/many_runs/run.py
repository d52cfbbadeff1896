"""A run: a policy, a model, and the numbers that tell it from others of its kind."""

import dataclasses
from collections.abc import Iterable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from experiments.folder import Row
from experiments.many_runs.shapes import SHAPES, TRAINING
from experiments.many_runs.variants import POLICIES
from experiments.presets import REFERENCE
from fp4jax import train
from fp4jax.data import DataConfig
from fp4jax.models import ModelConfig
from fp4jax.policies import Policy
from fp4jax.train import OptimConfig

STEPS_AT_ONCE = 50  # of one call of a compiled program, and of one mean of losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one row of results is of.

    Attributes:
      policy: name in `variants.POLICIES`.
      model: name in `shapes.SHAPES`.
      tokens: to train on, rounded to whole programs of `at_once` steps.
      lr: peak learning rate.
      seed: of the initial weights and of the batches.
      noise: of the random bits.
      rows: of a batch.
      length: tokens of a row.
      at_once: steps of one call of the compiled program.
    """

    policy: str
    model: str
    tokens: int
    lr: float
    seed: int = 0
    noise: int = 0
    rows: int = 128
    length: int = 512
    at_once: int = STEPS_AT_ONCE

    @property
    def steps(self) -> int:
        """Optimizer steps, a multiple of `at_once`."""
        batch = self.rows * self.length
        return self.at_once * max(1, round(self.tokens / batch / self.at_once))

    @classmethod
    def of(cls, row: Row) -> Self:
        """Returns the run that a row of results is of."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    @classmethod
    def whole(cls, model: str, lr: float) -> Self:
        """Returns the run of a model in BF16 on all its tokens."""
        tokens, rows, _ = TRAINING[model]
        return cls(policy=REFERENCE, model=model, lr=lr, tokens=tokens, rows=rows)

    def seeded(self, policies: Iterable[str], seeds: int) -> list[Self]:
        """Returns this run of every policy with every seed, of noise as well."""
        return [
            dataclasses.replace(self, policy=policy, seed=seed, noise=seed)
            for policy in policies
            for seed in range(seeds)
        ]

    @property
    def piece(self) -> Row:
        """The part of a row of results that names the run."""
        return dataclasses.asdict(self)

    @property
    def program(self) -> "Run":
        """The run whose compiled program this one can use."""
        return dataclasses.replace(self, tokens=0, lr=0.0, seed=0, noise=0)

    def shape(self, vocab_size: int) -> ModelConfig:
        """Returns the model's shape, with the vocabulary of a tokenizer."""
        return dataclasses.replace(SHAPES[self.model], vocab_size=vocab_size)

    def whole_policy(self, vocab_size: int) -> Policy:
        """Returns the policy of the model."""
        return POLICIES[self.policy](self.shape(vocab_size))

    @property
    def optim(self) -> OptimConfig:
        """AdamW, by `experiments.pretrain`'s defaults but for the learning rate."""
        return OptimConfig(lr=self.lr)

    @property
    def rates(self) -> NDArray[np.float32]:
        """The learning rate of every step."""
        schedule = train.make_schedule(self.optim, steps=self.steps)
        return np.asarray(schedule(np.arange(self.steps)), np.float32)

    def batches(self, data: DataConfig) -> DataConfig:
        """Returns how batches are drawn: with the seed of the run."""
        return dataclasses.replace(
            data,
            batch_size=self.rows,
            sequence_length=self.length,
            seed=self.seed,
        )


def tiny(*policies: str) -> list[Run]:
    """Returns runs of four steps of a very small model."""
    size = {"rows": 8, "length": 128, "at_once": 2}
    return [
        Run(policy=policy, model="tiny", tokens=4 * 8 * 128, lr=4e-3, **size)
        for policy in policies
    ]
