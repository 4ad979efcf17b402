"""Public paths of executors in the newer API age."""
