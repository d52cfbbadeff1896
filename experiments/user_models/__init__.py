"""Models of users, trained under every recipe by both ways of injecting it."""
