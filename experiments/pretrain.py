"""Trains one language model under several policies, and compares their losses.

python -m experiments.pretrain
python -m experiments.pretrain --policies ufp4,nvfp4 --seeds 3 --set optim.lr=1e-3
"""

import dataclasses
import functools
import inspect
import logging
import math
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.logging import RichHandler

from experiments import agreement, presets, processes, record, report, terminal
from experiments.compare import Comparison
from experiments.folder import Folder, of_processes
from experiments.presets import ExperimentConfig, RunConfig
from experiments.profiling import Profile
from experiments.report import tables
from experiments.stop import Stop
from experiments.tracking import TensorBoard
from experiments.trial import Stopped
from fp4jax import data, models, policies, sharding, train
from fp4jax.data import Corpus, DataConfig
from fp4jax.policies import Schedule

_CRASHED = 70  # the exit status of what may go well at another try
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
      What may go well at another try, a disk or a device that failed, ends with 70.
    - SIGTERM and Ctrl-C save the state of the run and end the command; the same one
      with --resume=auto then goes on, and gives the same losses bit for bit on the same
      devices. So does a run that was killed, from its last checkpoint.
    """

    model: str = presets.MODEL
    """shape of the model, from the list above."""
    policies: str = ",".join(presets.POLICIES)
    """policies to train, with commas between them: from the list above, or your own as
    FILE.py:FUNCTION, which returns a Recipe, or a Policy given the model's config."""
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
    alone: bool = False
    """trains the named policies only: no reference, no control, no n-grams."""
    resume: Literal["never", "auto"] = "never"
    """auto: goes on with the run in --out, or begins it there."""
    stop_status: int = 75
    """exit status after SIGTERM, which tells a scheduler to start the command again."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "data=1"
    """devices by what is spread over them: the rows of batches (data), with them also
    the parameters (fsdp) or the experts (expert), or the work inside a layer (tensor);
    on a CPU there are more with XLA_FLAGS=--xla_force_host_platform_device_count=8."""
    distributed: bool = False
    """one of several processes, which JAX finds by its environment (SLURM, Open MPI,
    or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID)."""
    wait: int = 300
    """seconds that a process of --distributed waits for all others to come."""
    tensorboard: bool = False
    """also writes the logs for TensorBoard, to the folder tensorboard in --out."""
    profile: Annotated[str, tyro.conf.arg(metavar="FIRST:LAST")] = ""
    """traces these steps of every policy's first seed by JAX's profiler, to the folder
    profile in --out; step 1 compiles. TensorBoard shows them, with xprof installed."""
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
        if arguments.distributed:  # first, as JAX takes SIGTERM for itself
            processes.initialize(timeout=arguments.wait)
        else:
            processes.check_alone()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with Stop() as stop:
        try:
            return run(arguments, argv, stop)
        except (Stopped, KeyboardInterrupt) as reason:
            is_term = stop.signal == signal.SIGTERM
            status = arguments.stop_status if is_term else 130
            return status if isinstance(reason, Stopped) else processes.leave(status)
        except Exception:
            traceback.print_exc()
            return processes.leave(_CRASHED)


def run(arguments: Arguments, argv: Sequence[str], stop: Stop) -> int:
    """Runs the command until it ends or is asked to stop, and returns its exit status.

    Raises:
      Stopped, KeyboardInterrupt: a signal came.
    """
    now = agreement.of_first(time.strftime("%Y%m%d-%H%M%S"))
    path = Path(arguments.out or f"runs/{arguments.model}-{now}")
    command = shlex.join(["python", "-m", "experiments.pretrain", *argv])
    try:
        with agreement.agreed():
            config, corpus, mesh = prepare(arguments, path)
            description = record.describe(config, corpus=corpus, command=command)
            profile = None
            if arguments.profile:
                steps, traces = config.run.steps, path / "profile"
                profile = Profile.parse(arguments.profile, steps=steps, folder=traces)
            events = path / "tensorboard"
            tracker = TensorBoard(events) if arguments.tensorboard else None
        agreement.check_same(
            of_processes(path, description) | {"--mesh": arguments.mesh}
        )
        is_resumed = arguments.resume == "auto"
        folder = Folder(path, description, resume=is_resumed, tracker=tracker)
    except agreement.WRONG as error:
        if agreement.is_first():
            print(f"error: {error}", file=sys.stderr)
        return 2
    if jax.process_index() == 0:
        print(introduction(config, corpus, mesh, path), file=sys.stderr)

    with folder:
        comparison = Comparison(
            config=config,
            corpus=corpus,
            folder=folder,
            description=description,
            stop=stop,
            mesh=mesh,
            profile=profile,
        )
        try:
            folder.keep_tokenizer(corpus.tokenizer.to_json())
            baselines = [] if arguments.alone else list(comparison.baselines())
            trials = list(comparison.trials())
            if jax.process_index() > 0:
                return 0
            found = report.summarize(trials, baselines, average=config.run.average)
            steps = tables.counted(config.run.steps, "step")
            title = f"{arguments.model}, {steps}: loss of every policy"
            report.write(found, trials, baselines, path, title=title, command=command)
        except (Stopped, KeyboardInterrupt):
            print(
                f"stopped: {path} holds what was done. The same command with "
                f"--out={path} --resume=auto goes on.",
                file=sys.stderr,
            )
            raise
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return processes.leave(_CRASHED if isinstance(error, OSError) else 2)
        failures = folder.failed_checkpoints
    console = terminal.console(100)
    console.print(report.table(found))
    console.print(found.verdict, style="bold red" if found.valid is False else "green")
    if failures:
        print(f"error: checkpoints not written: {failures}.", file=sys.stderr)
    diverged = [t for t in trials if not math.isfinite(t.heldout_loss)]
    failed = bool(diverged) if found.valid is None else not found.valid
    return int(failed or failures > 0)


def parse(argv: Sequence[str]) -> Arguments:
    """Returns the arguments; prints the help or an error and exits otherwise."""
    listed = presets.settings(presets.resolve())
    choices = {
        "Models": models.PRESETS,
        "Policies": policies.PRESETS,
        "Fields to --set, with those of tiny": _fields("tiny"),
        "More of mixtures of experts, with those of moe_tiny": _fields(
            "moe_tiny", listed
        ),
        "More of hybrids, with those of nemotron_h_tiny": _fields(
            "nemotron_h_tiny", listed
        ),
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


def _fields(model: str, listed: Container[str] = ()) -> list[str]:
    """Returns the fields of a model's experiment that are not listed yet."""
    fields = presets.settings(presets.resolve(model))
    return [f"{path}={value}" for path, value in fields.items() if path not in listed]


def prepare(
    arguments: Arguments, folder: Path
) -> tuple[ExperimentConfig, Corpus, Mesh | None]:
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
        alone=arguments.alone,
        assignments=arguments.set,
    )
    for name in config.policies:
        presets.schedule(config, name)  # raises if the model is too small for it
    mesh = parse_mesh(arguments.mesh, config)
    if arguments.resume == "never" and agreement.is_first():  # who then makes it
        record.check_free(folder)
    elif arguments.resume == "auto" and not arguments.out:
        raise ValueError("--resume: must come with --out, the folder to go on with.")
    corpus = data.load_corpus(config.data)
    data.train_batches(corpus, config.data)  # raises if a row is longer than the corpus
    return config, corpus, mesh


def parse_mesh(text: str, config: ExperimentConfig) -> Mesh | None:
    """Returns the mesh that `--mesh` describes; None for one device.

    Raises:
      ValueError: another axis, no number, too many devices, or what does not divide:
        the rows of batches, or a model under one of its policies.
    """
    mesh = sharding.make_mesh(**sharding.parse_mesh(text))
    if mesh.size == 1:
        return None
    batch_size, parts = config.data.batch_size, config.run.microbatches
    if batch_size // parts % (shards := sharding.num_shards("batch", mesh)):
        of_part = f" / run.microbatches={parts}" if parts > 1 else ""
        raise ValueError(
            f"--mesh: data, fsdp and expert must divide data.batch_size={batch_size}"
            f"{of_part}, got {text!r}, a product of {shards}."
        )
    tokens = batch_size // parts // shards * config.data.sequence_length
    for name in config.policies:
        for policy in Schedule.of(presets.schedule(config, name)).policies:
            make = functools.partial(models.Transformer, config.model, policy)
            model = nnx.eval_shape(lambda make=make: make(rngs=nnx.Rngs(0)))
            train.check_mesh(model, mesh, tokens=tokens)
    return mesh


def introduction(
    config: ExperimentConfig, corpus: Corpus, mesh: Mesh | None, folder: Path
) -> str:
    """Returns one line on what is about to happen."""
    tokens = config.data.batch_size * config.data.sequence_length
    used, visible = 1 if mesh is None else mesh.size, jax.device_count()
    more = f" ({visible} are there: --mesh=data={visible})"
    counted = tables.counted
    return (
        f"{counted(len(config.policies), 'policy', 'policies')} x "
        f"{counted(config.run.seeds, 'seed')} x {counted(config.run.steps, 'step')} "
        f"of {counted(tokens, 'token')}; "
        f"{counted(models.num_params(config.model), 'parameter')}, "
        f"{counted(corpus.num_train_tokens, 'token')} of text; "
        f"{counted(used, 'device')}{more if visible > used else ''}. Results: {folder}"
    )


if __name__ == "__main__":
    handler = RichHandler(console=Console(stderr=True), show_path=False)
    logging.basicConfig(format="%(message)s", handlers=[handler], force=True)
    sys.exit(main())
