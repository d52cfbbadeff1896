"""The first comparison of recipes, and the checks that make it believable."""
