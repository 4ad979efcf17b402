"""Weights from a trainer to a server, of later API levels: importable, and refused when used."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.distributed.weight_transfer import refuse


class NCCLTrainerSendWeightsArgs:
    """Refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("NCCLTrainerSendWeightsArgs")


class NCCLWeightTransferEngine:
    """Refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("NCCLWeightTransferEngine")

    @staticmethod
    def trainer_init(*args: Any, **kwargs: Any) -> NoReturn:
        refuse("NCCLWeightTransferEngine.trainer_init")

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> NoReturn:
        refuse("NCCLWeightTransferEngine.trainer_send_weights")
