"""Fast CPU kernels: which ones this machine gets, and their registration."""

from __future__ import annotations


def register() -> None:
    """Use the fastest kernels that this machine has."""
    from vllm.ops.cpu import onednn

    onednn.register()
