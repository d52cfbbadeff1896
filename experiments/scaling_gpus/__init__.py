"""How training scales over the GPUs of one host."""
