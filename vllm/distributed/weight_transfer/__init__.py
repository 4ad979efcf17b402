"""Names that trainers of later API levels import. What sends weights there is not in this engine's server."""

from __future__ import annotations

from typing import NoReturn


def refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: this server takes no weights from outside. Sample within the training processes "
        '(distributed_executor_backend="external_launcher", which trl calls vllm_mode="colocate"), or send weights '
        "with collective_rpc and vllm.distributed.device_communicators.pynccl.PyNcclCommunicator."
    )
