"""Families of models, one file each: architecture -> spec and names, nothing else."""
