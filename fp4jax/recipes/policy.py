"""Which recipe each linear layer of a model takes."""

import dataclasses
import fnmatch
from collections.abc import Iterable

from fp4jax.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Rule:
    """A recipe for all layers whose path matches a shell pattern.

    Attributes:
      pattern: Such as "blocks/3/*" or "*/attention/query"; "*" crosses slashes.
      recipe: What they take.
    """

    pattern: str
    recipe: Recipe


@dataclasses.dataclass(frozen=True)
class Policy:
    """Ordered rules; the first that matches a layer's path gives its recipe.

    Attributes:
      default: Recipe of layers that no rule matches.
      rules: The rules.
    """

    default: Recipe
    rules: tuple[Rule, ...] = ()

    def recipe(self, path: str) -> Recipe:
        """The recipe of the layer at a path such as "blocks/3/mlp/down"."""
        for rule in self.rules:
            if fnmatch.fnmatchcase(path, rule.pattern):
                return rule.recipe
        return self.default

    def check(self, paths: Iterable[str]) -> None:
        """Raises ValueError for a rule that matches none of a model's layers."""
        paths = list(paths)
        for rule in self.rules:
            if not fnmatch.filter(paths, rule.pattern):
                raise ValueError(
                    "Policy: every rule must match a layer, got "
                    f"pattern={rule.pattern!r}. The layers are {', '.join(paths)}."
                )
