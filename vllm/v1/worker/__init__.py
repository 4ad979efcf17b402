"""Public paths of workers in the newer API age."""
