"""Many short training runs on one device, compiled once for all that can share it."""
