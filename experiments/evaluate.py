"""Evaluates trained models: held-out loss, multiple choice, and samples of text.

python -m experiments.evaluate --checkpoint runs/tiny-20260101-120000
python -m experiments.evaluate --checkpoint OUT/checkpoints/ufp4-0 --sample "def "
"""

import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from flax import nnx
from numpy.typing import NDArray
from rich.console import Console

from experiments import heldout, named, record
from experiments.evaluate_flags import Arguments
from experiments.report import evaluations, tables
from experiments.saved import RunFolder, Saved
from experiments.terminal import console
from fp4jax import data, train
from fp4jax.data import Corpus
from fp4jax.data.tokenizers import Tokenizer
from fp4jax.train import Question

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is computed of each model.

    Attributes:
      corpus: whose held-out documents give the loss; None: no loss.
      questions: multiple choice.
      prompts: tokens of each text to go on from.
      out: file of results.
    """

    arguments: Arguments
    corpus: Corpus | None
    questions: Sequence[Question]
    prompts: Sequence[NDArray[np.integer]]
    tokenizer: Tokenizer
    out: Path

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
        found = heldout.evaluate(step, saved.state, corpus, rows)
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
        sampler = train.make_sampler(
            graph, temperature=arguments.temperature, top_k=arguments.top_k or None
        )
        prompts = zip(arguments.sample, self.prompts, strict=True)
        for number, (prompt, tokens) in enumerate(prompts):
            size, added = len(tokens), arguments.num_tokens
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
    rows: list[Row] = []
    try:
        folder = RunFolder.of(Path(arguments.checkpoint))
        task = prepare(arguments, folder)
        head = {
            "checkpoint": arguments.checkpoint,
            "data": (arguments.data or folder.data.source) if arguments.loss else None,
            "corpus": task.corpus and task.corpus.fingerprint,
            "choices": arguments.choices or None,
        }
        for row in evaluate(arguments, folder, task):
            rows = evaluations.with_gaps([*rows, row])
            record.write_json(task.out, head | {"results": rows} | record.setting())
    except (ValueError, TypeError, ImportError, OSError) as error:
        kept = f" {tables.counted(len(rows), 'result')} written." if rows else ""
        print(f"error: {error}{kept}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = tables.counted(len(rows), "result")
        print(f"interrupted: {kept} written.", file=sys.stderr)
        return 130
    show(rows, console(120))
    print(task.out)
    return 0


def prepare(arguments: Arguments, folder: RunFolder) -> Task:
    """Returns what to compute, its text read and all arguments checked.

    Raises:
      ValueError: nothing to compute, arguments without effect, text, questions or
        prompts that cannot be used, or no place for the results.
    """
    arguments.check()
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
        corpus = data.read_heldout(other, tokenizer)
    elif arguments.loss:
        corpus = data.load_corpus(config)
        tokenizer = corpus.tokenizer
    else:
        tokenizer = folder.tokenizer
    questions = train.read_questions(arguments.choices) if arguments.choices else []
    name = folder.name
    if corpus and arguments.data:
        text = named.file_name(Path(arguments.data).name)
        name += f"-on-{text}-{corpus.fingerprint[:8]}"
    return Task(
        arguments=arguments,
        corpus=corpus,
        questions=questions,
        prompts=_prompts(arguments, tokenizer, config.sequence_length),
        tokenizer=tokenizer,
        out=_writable(Path(arguments.out or folder.root / f"{name}.json")),
    )


def _prompts(
    arguments: Arguments, tokenizer: Tokenizer, length: int
) -> list[NDArray[np.integer]]:
    """Returns the tokens of each prompt."""
    added, found = arguments.num_tokens, list(tokenizer.encode(arguments.sample))
    for prompt, tokens in zip(arguments.sample, found, strict=True):
        size = len(tokens)
        if not 1 <= size <= size + added <= length:
            raise ValueError(
                f"--sample: prompt and --num-tokens must fit a row of {length} "
                f"tokens, the prompt not empty, got {size} tokens of {prompt!r} "
                f"and --num-tokens={added}."
            )
    return found


def _writable(out: Path) -> Path:
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(
            "--out: must be a file in a folder that can be written, got "
            f"{str(out)!r}. Make the folder, or name another file."
        )
    return out


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


def show(rows: Sequence[Row], out: Console) -> None:
    """Prints the results: a table, then the samples."""
    if any("domains" in row or "choices" in row for row in rows):
        header, cells = evaluations.table(rows)
        title, caption = "Trained models, evaluated", evaluations.caption(rows)
        out.print(tables.terminal(header, cells, title=title, caption=caption))
    for row in rows:
        for sample in row.get("samples", ()):
            out.rule(f"{row['policy']}, seed {row['seed']}, {row['forward']}")
            out.print(sample["prompt"], style="bold", end="", markup=False)
            out.print(sample["text"], markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
