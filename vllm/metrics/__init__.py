"""Counts what the engine does: Prometheus metrics and the statistics line of the log."""
