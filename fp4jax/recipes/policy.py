"""Which recipe each linear layer of a model takes."""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

from fp4jax.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Rule:
    """A recipe for all layers whose path matches a shell pattern.

    Attributes:
      pattern: such as "blocks/3/*" or "*/attention/query"; "*" crosses slashes.
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

    def recipe(self, path: str) -> Recipe:
        """Returns the recipe of the layer at a path such as "blocks/3/mlp/down"."""
        rule = self._match(path)
        return self.default if rule is None else rule.recipe

    def check(self, paths: Iterable[str]) -> None:
        """Raises ValueError for a rule that gives no layer of a model its recipe.

        Args:
          paths: of all layers, such as "blocks/3/mlp/down".

        Raises:
          ValueError: names the pattern, and the layers of the first block.
        """
        paths = list(paths)
        used = {self._match(path) for path in paths}
        for rule in self.rules:
            if rule not in used:
                first = [path for path in paths if _block(path) == _block(paths[0])]
                raise ValueError(
                    "Policy: every rule must be the first to match some layer, got "
                    f"pattern={rule.pattern!r}. There are {len(paths)} layers, those "
                    f"of the first block {', '.join(first)}."
                )

    def _match(self, path: str) -> Rule | None:
        """Returns the first rule that matches a path, or None."""
        matching = (r for r in self.rules if fnmatch.fnmatchcase(path, r.pattern))
        return next(matching, None)


def _block(path: str) -> list[str]:
    return path.split("/")[:2]


def _check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}.")
