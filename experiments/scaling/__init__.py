"""How the gaps of 4-bit recipes to BF16 change with compute."""
