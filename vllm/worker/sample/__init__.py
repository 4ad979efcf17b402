"""From logits to token ids, vectorised over rows that each have their own parameters; one file per concern."""
