"""Matrix products whose operands are quantized as a recipe says."""
