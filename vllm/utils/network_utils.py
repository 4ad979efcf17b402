"""Addresses and ports of this machine, under the newer path of these helpers."""

from __future__ import annotations

from vllm.utils import get_ip, get_open_port

__all__ = ["get_ip", "get_open_port"]
