"""What it costs that a tensor's scales change when it is transposed, or do not."""
