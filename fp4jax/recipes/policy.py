"""Which recipe each linear layer of a model takes, and from which step on."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fp4jax.numerics.checks import is_integer
from fp4jax.recipes.paths import listed
from fp4jax.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Rule:
    """A recipe for all layers whose path matches a shell pattern.

    Attributes:
      pattern: such as `"blocks/3/*"` or `"*/attention/query"`; `*` crosses slashes.
      recipe: what they take.
    """

    pattern: str
    recipe: Recipe

    def __post_init__(self):
        _check_type("Rule: pattern", self.pattern, str)
        _check_type("Rule: recipe", self.recipe, Recipe)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Ordered rules; the first that matches a layer's path gives its recipe.

    Attributes:
      default: recipe of layers that no rule matches.
      rules: a tuple of rules.
    """

    default: Recipe
    rules: tuple[Rule, ...] = ()

    def __post_init__(self):
        _check_type("Policy: default", self.default, Recipe)
        _check_type("Policy: rules", self.rules, tuple)
        for i, rule in enumerate(self.rules):
            _check_type(f"Policy: rules[{i}]", rule, Rule)

    @classmethod
    def of(cls, policy: "Policy | Recipe", caller: str) -> "Policy":
        """Returns a policy as it is, a recipe as the policy of all layers.

        Raises:
          TypeError: what is neither, in the caller's name.
        """
        if isinstance(policy, Recipe):
            return cls(policy)
        if not isinstance(policy, Policy):
            raise TypeError(
                f"{caller}: policy must be a Policy or a Recipe, got {policy!r}. Pass "
                "a value, such as recipes.ufp4()."
            )
        return policy

    def recipe(self, path: str) -> Recipe:
        """Returns the recipe of the layer at a path such as "blocks/3/mlp/down"."""
        rule = self._match(path)
        return self.default if rule is None else rule.recipe

    def map(self, function: Callable[[Recipe], Recipe]) -> "Policy":
        """Returns the policy of the same patterns with other recipes.

        Args:
          function: what becomes of each recipe.

        Example:
          >>> from fp4jax import recipes
          >>> Policy(recipes.ti2d()).map(lambda r: recipes.bf16()).default.fprop.x
        """
        rules = tuple(Rule(rule.pattern, function(rule.recipe)) for rule in self.rules)
        return Policy(function(self.default), rules)

    def check(self, paths: Iterable[str]) -> None:
        """Raises ValueError for a rule that gives no layer of a model its recipe.

        Args:
          paths: of all layers, such as "blocks/3/mlp/down".

        Raises:
          ValueError: names the pattern, and the layers, or the one that another rule
            takes.
        """
        paths = list(paths)
        used = {self._match(path) for path in paths}
        for rule in self.rules:
            if rule not in used:
                raise ValueError(
                    "Policy: every rule must be the first to match some layer, got "
                    f"pattern={rule.pattern!r}. {_remedy(rule.pattern, paths)}"
                )

    def _match(self, path: str) -> Rule | None:
        """Returns the first rule that matches a path, or None."""
        matching = (r for r in self.rules if fnmatch.fnmatchcase(path, r.pattern))
        return next(matching, None)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Policies that follow one another, such as a last phase in BF16.

    Attributes:
      phases: pairs of the step from which a policy holds, 0 first, and the policy.

    Example:
      >>> from fp4jax import recipes
      >>> fp4, finish = Policy(recipes.ufp4()), Policy(recipes.bf16())
      >>> Schedule(((0, fp4), (820, finish))).at(819) == fp4
      True
    """

    phases: tuple[tuple[int, Policy], ...]

    def __post_init__(self):
        _check_type("Schedule: phases", self.phases, tuple)
        for i, phase in enumerate(self.phases):
            _check_type(f"Schedule: phases[{i}]", phase, tuple)
            if len(phase) != 2 or not is_integer(phase[0]):
                raise TypeError(
                    f"Schedule: phases[{i}] must be an integer step and a policy, got "
                    f"{phase!r}."
                )
            _check_type(f"Schedule: phases[{i}][1]", phase[1], Policy)
        starts = [start for start, _ in self.phases]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise ValueError(
                "Schedule: phases must start at step 0, then at growing steps, got "
                f"{starts}."
            )

    @classmethod
    def of(cls, policy: "Policy | Schedule") -> "Schedule":
        """Returns a schedule as it is, a policy as the schedule that never changes."""
        return policy if isinstance(policy, Schedule) else cls(((0, policy),))

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies in their order."""
        return tuple(policy for _, policy in self.phases)

    def at(self, step: int) -> Policy:
        """Returns the policy of a step, counted from 0.

        Raises:
          ValueError: a negative step.
        """
        if step < 0:
            raise ValueError(
                f"Schedule.at: step must not be negative, got step={step}."
            )
        return [policy for start, policy in self.phases if start <= step][-1]

    def spans(self, steps: int) -> Iterator[tuple[Policy, int]]:
        """Returns each policy of a run of `steps`, and how many steps end it.

        Raises:
          ValueError: a phase that the run would not reach.
        """
        starts = [start for start, _ in self.phases]
        if starts[-1] >= steps:
            raise ValueError(
                "Schedule.spans: steps must be more than the start of the last phase, "
                f"or that has no effect, got steps={steps} with a start at "
                f"{starts[-1]}. Train longer, or leave the phase out."
            )
        return zip(self.policies, [*starts[1:], steps], strict=True)

    def check(self, paths: Iterable[str]) -> None:
        """Raises ValueError as `Policy.check` does, for any of the policies."""
        paths = list(paths)
        for policy in self.policies:
            policy.check(paths)


def _remedy(pattern: str, paths: list[str]) -> str:
    """Returns what to do with the pattern of a rule that gives no layer its recipe."""
    if taken := [path for path in paths if fnmatch.fnmatchcase(path, pattern)]:
        return f"Rules before it match {taken[0]!r} as well. Move it before them."
    return f"The layers are {listed(paths, near=pattern)}."


def _check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}.")
