"""How much the grids shrink, expand and blur arrays of several distributions."""
