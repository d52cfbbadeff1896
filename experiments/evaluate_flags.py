"""The flags of experiments.evaluate, and which of them go together."""

import dataclasses
from typing import Annotated, Literal

import tyro

from fp4jax import data, train

_OF_SAMPLES = ("num_tokens", "temperature", "top_k", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Evaluates trained models: held-out loss, multiple choice, and samples of text.

    - Everything is computed twice: with the forward GEMMs quantized as in the last step
      of training, and with them in BF16. Only the first says what a model is worth that
      is also used in FP4; the difference is what rounding costs at that moment.
    - Losses are in nats/token and bits/byte, of every domain and of all together, with
      gaps to the model trained in BF16 where the run has one.
    - Checkpoints are only read: a run may go on meanwhile. One that is damaged is left
      out for the one before it.
    - Results are printed at the end, and written as JSON after each model. Wrong
      arguments are one error, exit status 2.
    """

    checkpoint: str
    """folder of a run, or of one of its trials: OUT/checkpoints/POLICY-SEED."""
    step: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """of the checkpoint; by default the newest that can be read."""
    forward: Literal["quantized", "bf16", "both"] = "both"
    """how the GEMMs of the forward pass are computed."""
    data: str = ""
    """other text, all of it: as for experiments.pretrain, or a folder of
    experiments.tokenize with the run's tokenizer, of which held-out documents count. By
    default the held-out text of the run."""
    text_field: str = "text"
    """field of a record of --data that holds its text."""
    loss: bool = True
    """computes the loss on text."""
    choices: str = ""
    """file of questions, a line each: {"context": "2 + 2 =", "choices": [" 4", " 5"],
    "answer": 0}. A choice follows its context at once."""
    sample: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """prompt that the model goes on from; may be given several times. Without a cache
    of keys and values: each token costs a forward pass over a whole row."""
    num_tokens: int = 64
    """to sample; with the prompt at most the length of a row."""
    temperature: float = 0.8
    """of sampling; 0 takes the most probable token."""
    top_k: int = 0
    """most probable tokens to sample from; 0: all."""
    seed: int = 0
    """of sampling."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = ""
    """JSON file of results; by default evaluation.json in the folder of the run, or
    evaluation-POLICY-SEED.json; with --data, their names end in -on-DATA-HASH."""

    def check(self) -> None:
        """Raises ValueError where nothing is asked for, or what has no effect."""
        if not (self.loss or self.choices or self.sample):
            raise ValueError("--no-loss: must come with --choices or --sample.")
        if self.data and not self.loss:
            raise ValueError(f"--data: must not come with --no-loss, got {self.data}.")
        unused = {} if self.sample else dict.fromkeys(_OF_SAMPLES, "come with --sample")
        if not self.data:
            unused["text_field"] = "come with --data"
        elif data.is_tokenized(self.data):
            unused["text_field"] = "not come with --data that is tokenized"
        default = Arguments(checkpoint=self.checkpoint)
        for name, allowed in unused.items():
            if (found := getattr(self, name)) != getattr(default, name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag}: must {allowed}, got {flag}={found}.")
        train.check_sampling(temperature=self.temperature, top_k=self.top_k or None)
