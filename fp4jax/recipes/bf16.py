"""The baseline: all three GEMMs in bfloat16."""

from fp4jax.recipes.recipe import Recipe


def bf16() -> Recipe:
    """Returns the recipe that quantizes nothing: bfloat16 operands, float32 sums."""
    return Recipe()
