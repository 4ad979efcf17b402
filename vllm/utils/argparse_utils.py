"""`FlexibleArgumentParser` under its newer path."""

from __future__ import annotations

from vllm.utils.argparse import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
