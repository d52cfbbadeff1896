"""Trained models out of the folder of a run: what they are, and their states."""

import dataclasses
import json
from pathlib import Path
from typing import Self

from flax import nnx

from fp4jax import data, models, policies, recipes, train
from fp4jax.data import DataConfig
from fp4jax.data.tokenizers import Tokenizer, load_tokenizer
from fp4jax.models import ModelConfig
from fp4jax.policies import Schedule
from fp4jax.train import Checkpoints, OptimConfig, TrainState

# What `--forward` asks for.
QUANTIZED, BF16 = "quantized", "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """The trained model of one trial.

    Attributes:
      policy, seed: name it.
      corpus: fingerprint of the text that it was trained on.
      sequence_length, batch_size: of training.
      schedule: that it was trained under.
      model: of that structure; its arrays are not trained.
      state: at some step.
    """

    policy: str
    seed: int
    corpus: str
    sequence_length: int
    batch_size: int
    schedule: Schedule
    model: models.Transformer
    state: TrainState

    @classmethod
    def read(cls, folder: Path, *, step: int | None = None) -> Self:
        """Returns what the checkpoints of a trial hold; see `Checkpoints.restore`.

        Args:
          folder: `OUT/checkpoints/POLICY-SEED`.
          step: the only one to read; None reads the newest that can be.

        Raises:
          ValueError: no checkpoint that can be read.
        """
        note = train.read_config(folder, step=step)
        config = note["config"]
        shape = ModelConfig.of(config["model"])
        schedule = Schedule.of(recipes.from_json(note["policies"][note["policy"]]))
        model = models.Transformer(shape, schedule, rngs=nnx.Rngs(note["seed"]))
        optimizer = train.make_optimizer(
            OptimConfig(**config["optim"]), steps=config["run"]["steps"]
        )
        _, like = train.make_state(model, optimizer.transform)
        with Checkpoints(folder, config=note, read_only=True) as checkpoints:
            found = checkpoints.restore(like, step=step)
        assert found is not None  # there is one, as its note was read
        return cls(
            policy=note["policy"],
            seed=note["seed"],
            corpus=note["corpus"],
            sequence_length=config["data"]["sequence_length"],
            batch_size=config["data"]["batch_size"],
            schedule=schedule,
            model=model,
            state=found.state,
        )

    @property
    def step(self) -> int:
        """How many steps of training are done."""
        return int(self.state.step)

    @property
    def forwards(self) -> tuple[str, ...]:
        """The forward passes that differ: BF16, after the quantized one if it is."""
        policy, shape = self.schedule.at(max(0, self.step - 1)), self.model.config
        recipes_used = {policy.recipe(path) for path in shape.layer_paths}
        quantizes = any(used.fprop != recipes.Fprop() for used in recipes_used)
        return (QUANTIZED, BF16) if quantizes else (BF16,)

    def graph(self, forward: str) -> nnx.GraphDef:
        """Returns the model with the forward pass of its last step, or in BF16."""
        if forward == QUANTIZED:
            self.model.set_policy(self.schedule.at(max(0, self.step - 1)))
        else:
            self.model.set_policy(policies.bf16(self.model.config))
        return nnx.graphdef(self.model)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A folder that experiments.pretrain has made, or one trial's part of it.

    Attributes:
      root: holds config.json.
      trials: the folders of checkpoints.
      whole: not of one trial only.
    """

    root: Path
    trials: tuple[Path, ...]
    whole: bool

    @classmethod
    def of(cls, path: Path) -> Self:
        """Returns what a path, `OUT` or `OUT/checkpoints/POLICY-SEED`, stands for.

        Raises:
          ValueError: no checkpoints, or no config.json where it belongs.
        """
        whole = not _is_trial(path)
        found = sorted(path.glob("checkpoints/*")) if whole else [path]
        trials = tuple(folder for folder in found if _is_trial(folder))
        root = path if whole else path.absolute().parents[1]
        if not trials or not (root / "config.json").is_file():
            wanted = f"{root / 'config.json'}" if trials else "checkpoints"
            raise ValueError(
                "--checkpoint: must be the folder of a run, or its part "
                f"checkpoints/POLICY-SEED, got {str(path)!r} without {wanted}."
            )
        return cls(root, trials, whole)

    @property
    def name(self) -> str:
        """What its results are called: all of a run, or those of one trial."""
        return "evaluation" if self.whole else f"evaluation-{self.trials[0].name}"

    @property
    def data(self) -> DataConfig:
        """What the run has trained on."""
        description = json.loads((self.root / "config.json").read_text("utf-8"))
        return DataConfig(**description["config"]["data"])

    @property
    def tokenizer(self) -> Tokenizer:
        """What its models were trained on, from its text if the folder lacks it."""
        config, path = self.data, self.root / "tokenizer.json"
        if path.is_file():
            text = path.read_text("utf-8")
            return load_tokenizer(text, vocab_size=config.vocab_size)
        if config.tokenizer == "bytes":
            return load_tokenizer("", vocab_size=config.vocab_size)
        return data.load_corpus(config).tokenizer


def _is_trial(folder: Path) -> bool:
    return folder.is_dir() and any(each.name.isdecimal() for each in folder.iterdir())
