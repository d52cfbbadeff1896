"""What the folders of runs hold so far, finished or not."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.folder import identity, number, read_log
from experiments.presets import REFERENCE
from experiments.report import evaluations
from experiments.report.curves import gap, smooth

ALL = "all"  # of the domains, together

# Settings that runs which are compared with one another may differ in.
_FREE = ("seed", "seeds", "eval_every", "average")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One run of a policy, as far as it has come.

    Attributes:
      steps: of the whole run.
      tokens_per_step: that it trains on.
      losses: training loss by step; NaN where a step was skipped.
      heldout: by domain and step, in nats/token.
      bits_per_byte: by step, of all domains.
      speeds: tokens per second, of the steps that have one.
      finished: its result is there, and the reason where it ended early.
    """

    policy: str
    seed: int
    steps: int
    tokens_per_step: int
    losses: Mapping[int, float]
    heldout: Mapping[str, Mapping[int, float]]
    bits_per_byte: Mapping[int, float]
    speeds: Sequence[float]
    skipped: int
    spikes: int
    finished: bool
    stopped_by: str | None

    @property
    def step(self) -> int:
        """The newest step."""
        return max(self.losses, default=0)

    @cached_property
    def smoothed(self) -> dict[int, float]:
        """Training loss by step, averaged over about a fiftieth of the run before."""
        weight = 1 - 1 / max(20, self.steps // 50)
        means = smooth(list(self.losses.values()), weight)
        return dict(zip(self.losses, means.tolist(), strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Trials of equal settings, out of one or several folders.

    Attributes:
      names: of the folders.
      descriptions: their config.json.
      trials: one for each policy and seed.
      baselines: rows of n-gram models from report.json.
      evaluations: results from evaluation*.json on the text of the runs; one for each
        policy, seed, step and forward pass.
    """

    names: tuple[str, ...]
    descriptions: tuple[Mapping[str, Any], ...]
    trials: tuple[Trial, ...]
    baselines: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]

    @property
    def policies(self) -> dict[str, list[Trial]]:
        """The trials of every policy."""
        found: dict[str, list[Trial]] = {}
        for trial in self.trials:
            found.setdefault(trial.policy, []).append(trial)
        return found

    @property
    def missing(self) -> set[tuple[str, int]]:
        """Policy and seed of each trial that is not finished, begun or not."""
        planned = set()
        for description in self.descriptions:
            run, names = description["config"]["run"], description["config"]["policies"]
            seeds = range(run["seed"], run["seed"] + run["seeds"])
            planned |= set(itertools.product(names, seeds))
        return planned - {(t.policy, t.seed) for t in self.trials if t.finished}

    @property
    def domains(self) -> list[str]:
        """All together first, then each, where there are several."""
        return list(dict.fromkeys(name for t in self.trials for name in t.heldout))

    @cached_property
    def _references(self) -> dict[int, Trial]:
        return {t.seed: t for t in self.trials if t.policy == REFERENCE}

    def train_gap(self, trial: Trial) -> dict[int, float]:
        """Returns the gap to BF16 of the same seed by step, of smoothed losses."""
        reference = self._references.get(trial.seed)
        return {} if reference is None else gap(trial.smoothed, reference.smoothed)

    def heldout_gap(self, trial: Trial, domain: str = ALL) -> dict[int, float]:
        """Returns the gap to BF16 of the same seed by step, on a domain."""
        reference = self._references.get(trial.seed)
        if reference is None:
            return {}
        return gap(trial.heldout.get(domain, {}), reference.heldout.get(domain, {}))


def read(folders: Sequence[Path]) -> list[Group]:
    """Returns the trials of all folders, those of equal settings in one group.

    A policy and seed that several folders of a group hold is that of the first.

    Raises:
      ValueError: a folder that no run has made, or one without a step; or folders of
        equal settings where a policy has different recipes.
    """
    found: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    for folder in folders:
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(
                f"report: must be folders of experiments.pretrain, got {str(folder)!r} "
                "without config.json."
            )
        description = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(_comparable(description), []).append((folder, description))
    groups = [_group(members) for members in found.values()]
    for group in groups:
        if not group.trials:
            raise ValueError(
                f"report: {', '.join(group.names)} must hold a step, got none yet."
            )
    return groups


def _comparable(description: Mapping[str, Any]) -> str:
    """Returns what trials share whose losses can be compared, as text."""
    kept = identity(description)
    run = {k: v for k, v in kept["config"]["run"].items() if k not in _FREE}
    config = kept["config"] | {"run": run, "policies": None}
    return json.dumps({"config": config, "corpus": kept["corpus"]}, sort_keys=True)


def _check_recipes(members: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    """Raises ValueError where a policy of one name is not the same everywhere."""
    first: dict[str, tuple[Path, Any]] = {}
    for folder, description in members:
        for name, recipe in description["policies"].items():
            other, expected = first.setdefault(name, (folder, recipe))
            if recipe != expected:
                raise ValueError(
                    f"report: policy {name!r} must have the same recipes in all runs "
                    f"of equal settings, got others in {str(folder)!r} than in "
                    f"{str(other)!r}. Report on them one at a time."
                )


def _group(members: Sequence[tuple[Path, Mapping[str, Any]]]) -> Group:
    _check_recipes(members)
    trials: dict[tuple[str, int], Trial] = {}
    baselines: list[Mapping[str, Any]] = []
    results: dict[tuple, Mapping[str, Any]] = {}
    for folder, description in members:
        for trial in _trials(folder, description):
            trials.setdefault((trial.policy, trial.seed), trial)
        path = folder / "report.json"
        if not baselines and path.is_file():
            baselines = json.loads(path.read_text(encoding="utf-8"))["baselines"]
        results = _results(folder, description["corpus"]) | results
    return Group(
        names=tuple(folder.name for folder, _ in members),
        descriptions=tuple(description for _, description in members),
        trials=tuple(trials.values()),
        baselines=tuple(baselines),
        evaluations=tuple(evaluations.with_gaps([*results.values()])),
    )


def _results(folder: Path, corpus: str) -> dict[tuple, Mapping[str, Any]]:
    """Returns what was evaluated on a corpus, or without any, the newest of each."""
    found: dict[tuple, Mapping[str, Any]] = {}
    paths = folder.glob("evaluation*.json")
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name)):
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.get("corpus") in (None, corpus):
            for row in value["results"]:
                key = (row["policy"], row["seed"], row["step"], row["forward"])
                found[key] = {**found.get(key, {}), **row}
    return found


def _trials(folder: Path, description: Mapping[str, Any]) -> list[Trial]:
    config = description["config"]
    logs: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for name in ("metrics", "evaluations", "trials"):
        for row in read_log(folder / f"{name}.jsonl"):
            log = logs.setdefault((row["policy"], row["seed"]), {})
            log.setdefault(name, []).append(row)
    return [
        _trial(policy, seed, log, config)
        for (policy, seed), log in logs.items()
        if "metrics" in log
    ]


def _trial(
    policy: str,
    seed: int,
    log: Mapping[str, list[dict[str, Any]]],
    config: Mapping[str, Any],
) -> Trial:
    steps, data = config["run"]["steps"], config["data"]
    metrics, finished = log["metrics"], log.get("trials", [])
    evaluated = [
        *log.get("evaluations", []),
        *({"step": steps, **row} for row in finished if row["heldout_loss"]),
    ]
    heldout: dict[str, dict[int, float]] = {}
    for row in evaluated:
        rows = {ALL: row} | row.get("domains", {})
        for domain, each in rows.items():
            heldout.setdefault(domain, {})[row["step"]] = number(each["heldout_loss"])
    return Trial(
        policy=policy,
        seed=seed,
        steps=steps,
        tokens_per_step=data["batch_size"] * data["sequence_length"],
        losses={
            r["step"]: number(None if r.get("skipped") else r["loss"]) for r in metrics
        },
        heldout=heldout,
        bits_per_byte={r["step"]: number(r["bits_per_byte"]) for r in evaluated},
        speeds=[r["tokens_per_s"] for r in metrics if r["tokens_per_s"] is not None],
        skipped=sum(bool(r.get("skipped")) for r in metrics),
        spikes=sum(bool(r.get("spike")) for r in metrics),
        finished=bool(finished),
        stopped_by=finished[0].get("stopped_by") if finished else None,
    )
