"""Which parts of the recipes matter, and where the noise of `ufp4` comes from."""
