"""Weights from a trainer to a server, of later API levels: importable, and refused when used."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.distributed.weight_transfer import refuse


def trainer_init(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused."""
    refuse("trainer_init")
