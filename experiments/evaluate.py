"""Evaluates trained models: held-out loss, multiple choice, and samples of text.

python -m experiments.evaluate --checkpoint runs/tiny-20260101-120000
python -m experiments.evaluate --checkpoint OUT/checkpoints/ufp4-0 --sample "def "
"""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from flax import nnx
from rich.console import Console

from experiments import record
from experiments.report import evaluations, tables
from experiments.saved import RunFolder, Saved
from fp4jax import data, train
from fp4jax.data import Corpus
from fp4jax.data.tokenizers import Tokenizer
from fp4jax.train import Question

Row = dict[str, Any]


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
    - Results are printed, and written as JSON. Wrong arguments are one error, exit
      status 2.
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
    evaluation-POLICY-SEED.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is computed of each model.

    Attributes:
      corpus: whose held-out documents give the loss; None: no loss.
      questions: multiple choice.
    """

    arguments: Arguments
    corpus: Corpus | None
    questions: Sequence[Question]
    tokenizer: Tokenizer

    def __call__(self, saved: Saved, forward: str) -> Row:
        """Returns the results of a model under a forward pass, as JSON has them."""
        graph = saved.graph(forward)
        row: Row = {"policy": saved.policy, "seed": saved.seed}
        row |= {"step": saved.step, "forward": forward}
        if self.corpus is not None:
            row["domains"] = self._losses(saved, graph, self.corpus)
        if self.questions:
            found = train.answer(
                compiled(train.make_log_likelihoods, graph),
                saved.state,
                self.questions,
                tokenizer=self.tokenizer,
                sequence_length=saved.sequence_length,
                batch_size=saved.batch_size,
            )
            row["choices"] = dataclasses.asdict(found)
        if self.arguments.sample:
            row["samples"] = list(self._samples(saved, graph))
        return row

    def _losses(self, saved: Saved, graph: nnx.GraphDef, corpus: Corpus) -> Row:
        step = compiled(train.make_eval_step, graph)
        rows = data.DataConfig(
            sequence_length=saved.sequence_length, batch_size=saved.batch_size
        )
        found = {
            domain.name: train.evaluate(
                step,
                saved.state,
                data.heldout_batches(corpus, rows, domain=domain.name),
                token_bytes=corpus.token_bytes,
            )
            for domain in corpus.domains
        }
        if len(found) > 1:
            found = {"all": train.Evaluation.sum(found.values())} | found
        return {
            name: {
                "heldout_loss": each.nats_per_token,
                "bits_per_byte": each.bits_per_byte,
                "tokens": each.tokens,
                "bytes": each.bytes,
            }
            for name, each in found.items()
        }

    def _samples(self, saved: Saved, graph: nnx.GraphDef) -> Iterator[Row]:
        arguments, length = self.arguments, saved.sequence_length
        make = functools.partial(
            train.make_sampler,
            temperature=arguments.temperature,
            top_k=arguments.top_k or None,
        )
        sampler = make(graph)
        for number, prompt in enumerate(arguments.sample):
            (tokens,) = self.tokenizer.encode([prompt])
            size, added = len(tokens), arguments.num_tokens
            if not 1 <= size <= size + added <= length:
                raise ValueError(
                    f"--sample: prompt and --num-tokens must fit a row of {length} "
                    f"tokens, the prompt not empty, got {size} tokens of {prompt!r} "
                    f"and --num-tokens={added}."
                )
            buffer = np.pad(np.asarray(tokens, np.int32), (0, length - size))
            key = jax.random.fold_in(jax.random.key(arguments.seed), number)
            found = np.asarray(sampler(saved.state, buffer, size, added, key))
            new = found[size : size + added].tolist()
            if self.tokenizer.endoftext in new:
                new = new[: new.index(self.tokenizer.endoftext)]
            yield {"prompt": prompt, "text": self.tokenizer.decode(new)}


@functools.lru_cache(maxsize=4)
def compiled(make: Callable[[nnx.GraphDef], Callable], graph: nnx.GraphDef) -> Callable:
    """Returns a program, which compiles once for all seeds of a policy."""
    return make(graph)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = tyro.cli(Arguments, prog="python -m experiments.evaluate", args=argv)
    logging.getLogger("absl").setLevel(logging.ERROR)  # says that it only reads
    try:
        folder = RunFolder.of(Path(arguments.checkpoint))
        task = prepare(arguments, folder)
        rows = evaluations.with_gaps(list(evaluate(arguments, folder, task)))
        out = Path(arguments.out or folder.root / f"{folder.name}.json")
        found = {
            "checkpoint": arguments.checkpoint,
            "data": (arguments.data or folder.data.source) if arguments.loss else None,
            "corpus": task.corpus and task.corpus.fingerprint,
            "choices": arguments.choices or None,
            "results": rows,
            **record.setting(),
        }
        record.write_json(out, found)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: no results are written.", file=sys.stderr)
        return 130
    console = Console()
    if not console.is_terminal:
        console.width = 120
    show(rows, console)
    print(out)
    return 0


def prepare(arguments: Arguments, folder: RunFolder) -> Task:
    """Returns what to compute, its text read.

    Raises:
      ValueError: nothing to compute, or text or questions that cannot be used.
    """
    if not (arguments.loss or arguments.choices or arguments.sample):
        raise ValueError("--no-loss: must come with --choices or --sample.")
    config = folder.data
    corpus = None
    if arguments.data:
        tokenizer = folder.tokenizer
        other = dataclasses.replace(
            config,
            source=arguments.data,
            text_field=arguments.text_field,
            site_packages=False,
        )
        corpus = data.read_heldout(other, tokenizer) if arguments.loss else None
    elif arguments.loss:
        corpus = data.load_corpus(config)
        tokenizer = corpus.tokenizer
    else:
        tokenizer = folder.tokenizer
    questions = train.read_questions(arguments.choices) if arguments.choices else []
    return Task(
        arguments=arguments, corpus=corpus, questions=questions, tokenizer=tokenizer
    )


def evaluate(arguments: Arguments, folder: RunFolder, task: Task) -> Iterator[Row]:
    """Yields the results of every trial, under each forward pass that is asked for.

    A model that quantizes nothing forward has one forward pass, called BF16.

    Raises:
      ValueError: a checkpoint that cannot be read, or text that has changed.
    """
    for path in folder.trials:
        saved = Saved.read(path, step=arguments.step)
        corpus = task.corpus
        if corpus and not arguments.data and corpus.fingerprint != saved.corpus:
            raise ValueError(
                f"--checkpoint: the text {folder.data.source!r} must be what the run "
                f"trained on, got corpus {corpus.fingerprint[:12]}, not "
                f"{saved.corpus[:12]}. Name text with --data."
            )
        wanted = saved.forwards
        if arguments.forward != "both" and len(wanted) > 1:
            wanted = (arguments.forward,)
        for forward in wanted:
            print(f"{path.name}, step {saved.step}, {forward}", file=sys.stderr)
            yield task(saved, forward)


def show(rows: Sequence[Row], console: Console) -> None:
    """Prints the results: a table, then the samples."""
    if any("domains" in row or "choices" in row for row in rows):
        header, cells = evaluations.table(rows)
        title, caption = "Trained models, evaluated", evaluations.CAPTION
        console.print(tables.terminal(header, cells, title=title, caption=caption))
    for row in rows:
        for sample in row.get("samples", ()):
            console.rule(f"{row['policy']}, seed {row['seed']}, {row['forward']}")
            console.print(sample["prompt"], style="bold", end="", markup=False)
            console.print(sample["text"], markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
