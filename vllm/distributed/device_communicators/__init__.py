"""Collectives between processes that are not of one engine, under the names that training programs know."""
