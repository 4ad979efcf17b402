"""Makes the demo model: text generator, tokenizer, trainer and the check of the result."""
