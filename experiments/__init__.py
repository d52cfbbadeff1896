"""Commands that train, compare and report; each is run as `python -m`."""
