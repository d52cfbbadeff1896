"""Whether every family of models learns under every policy."""
