"""Public paths of what attention layers are given."""
