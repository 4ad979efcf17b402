"""Public paths of the engine in the newer API age."""
