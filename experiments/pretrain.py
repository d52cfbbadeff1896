"""Trains one language model under several policies, and compares their losses.

python -m experiments.pretrain
python -m experiments.pretrain --policies ufp4,nvfp4 --seeds 3 --set optim.lr=1e-3
"""

import dataclasses
import inspect
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments import presets, record, report
from experiments.compare import Comparison
from experiments.presets import ExperimentConfig, RunConfig
from fp4jax import data, models, policies, train
from fp4jax.data import Corpus, DataConfig

_INDENT = {"initial_indent": "  ", "subsequent_indent": "  "}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Trains one language model under several policies, and compares their losses.

    - Every policy sees the same batches from the same initial weights.
    - BF16 always trains, as the reference, and so does a 2-bit control, which must
      lose plainly: if not, no gap can be trusted, and the exit status is 1.
    - N-gram models stand beside them, fitted on exactly the tokens that they saw.
    - Text holds no NaN: a run whose loss is not finite ends in the report as diverged,
      and unless it is the control's, the exit status is 1.
    - Wrong arguments or data are one error, exit status 2, and leave nothing behind.
    """

    model: str = presets.MODEL
    """shape of the model, from the list above."""
    policies: str = ",".join(presets.POLICIES)
    """policies to train, from the list above, with commas between them."""
    data: str = DataConfig.source
    """text: this Python's standard library (stdlib), a file or folder of text or of
    records, hf:NAME, a mixture.json, or a folder made by experiments.tokenize."""
    steps: int = RunConfig.steps
    """optimizer steps of every run."""
    seeds: int = RunConfig.seeds
    """runs of every policy, each on other batches; from 2 on, their spread is shown."""
    finish: str = RunConfig.finish
    """what policies end in: none, bf16, or bf16_forward (quantized backward pass)."""
    finish_fraction: float = RunConfig.finish_fraction
    """part of the steps that the finish takes."""
    set: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATH=VALUE")
    ] = ()
    """sets a field of the configuration, listed above, such as optim.lr=3e-4."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = ""
    """new or empty folder for the results; by default runs/, the model and the time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    try:
        config, corpus, folder = prepare(arguments)
        command = shlex.join(["python", "-m", "experiments.pretrain", *argv])
        record.create(folder, record.describe(config, command=command))
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{introduction(config, corpus)} Results: {folder}", file=sys.stderr)

    try:
        with train.JsonLines(folder / "metrics.jsonl") as log:
            comparison = Comparison(config=config, corpus=corpus, log=log)
            baselines, trials = list(comparison.baselines()), list(comparison.trials())
    except KeyboardInterrupt:
        print(f"interrupted: {folder} holds what was logged.", file=sys.stderr)
        return 130
    found = report.summarize(trials, baselines, average=config.run.average)
    title = f"{arguments.model}, {config.run.steps} steps: loss of every policy"
    report.write(found, trials, baselines, folder, title=title, command=command)
    console = Console()
    if not console.is_terminal:
        console.width = 100  # of a log file, where the default of 80 cuts columns
    console.print(report.table(found))
    console.print(found.verdict, style="green" if found.valid else "bold red")
    return 0 if found.valid else 1


def parse(argv: Sequence[str]) -> Arguments:
    """Returns the arguments; prints the help or an error and exits otherwise."""
    settings = presets.settings(presets.resolve())
    choices = {
        "Models": models.PRESETS,
        "Policies": policies.PRESETS,
        "Fields to --set, with those of tiny": [
            f"{k}={v}" for k, v in settings.items()
        ],
    }
    lists = [
        f"{name}:\n{textwrap.fill(', '.join(values), 80, **_INDENT)}"
        for name, values in choices.items()
    ]
    return tyro.cli(
        Arguments,
        prog="python -m experiments.pretrain",
        description="\n\n".join([inspect.cleandoc(Arguments.__doc__ or ""), *lists]),
        args=argv,
    )


def prepare(arguments: Arguments) -> tuple[ExperimentConfig, Corpus, Path]:
    """Returns all that a comparison needs, and leaves no trace but cached tokens.

    Raises:
      ValueError: arguments or data that cannot be used.
      TypeError: a setting of the wrong type.
    """
    config = presets.resolve(
        arguments.model,
        policy_names=arguments.policies.split(","),
        data=arguments.data,
        steps=arguments.steps,
        seeds=arguments.seeds,
        finish=arguments.finish,
        finish_fraction=arguments.finish_fraction,
        assignments=arguments.set,
    )
    for name in config.policies:
        presets.schedule(config, name)  # raises if the model is too small for it
    now = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(arguments.out or f"runs/{arguments.model}-{now}")
    record.check_free(folder)
    corpus = data.load_corpus(config.data)
    data.train_batches(corpus, config.data)  # raises if a row is longer than the corpus
    return config, corpus, folder


def introduction(config: ExperimentConfig, corpus: Corpus) -> str:
    """Returns one line on what is about to happen."""
    tokens = config.data.batch_size * config.data.sequence_length
    return (
        f"{len(config.policies)} policies x {config.run.seeds} seeds x "
        f"{config.run.steps} steps of {tokens} tokens; "
        f"{models.num_params(config.model):,} parameters, "
        f"{corpus.num_train_tokens:,} tokens of text."
    )


if __name__ == "__main__":
    sys.exit(main())
