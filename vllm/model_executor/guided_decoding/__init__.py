"""Public path of the older guided decoding options."""
