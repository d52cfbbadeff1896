"""The baseline: all three GEMMs in bfloat16."""

from fp4jax.recipes.recipe import Recipe


def bf16() -> Recipe:
    """Operands cast to bfloat16, float32 sums, nothing quantized."""
    return Recipe()
