"""The operands of a model in training: what 4-bit grids make of them."""
