"""The newer path of what poolers learn."""
