"""Where a model's weights come from: one way for each `load_format`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm.distributed import TensorParallel
from vllm.logger import init_logger
from vllm.model_executor.model_loader import rank_state
from vllm.model_executor.model_loader.checkpoint import find_checkpoint
from vllm.model_executor.model_loader.npcache import cached_tensors
from vllm.model_executor.model_loader.rank_state import RankState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# (name, tensor, file) of a checkpoint; or one rank's weights as they are kept; or None for random ones
Weights = Iterable[tuple[str, Tensor, Path]] | RankState | None


@contextmanager
def open_weights(config: VllmConfig, device: torch.device, tp: TensorParallel, stage: int) -> Iterator[Weights]:
    """The configured weights. They are read while this is open.

    device: where tensors may be read to at once, by the formats that can.   Raises ValueError if there are none.
    """
    folder, load = Path(config.model_config.path), config.load_config
    rank, world = rank_state.number(tp, stage), tp.world * config.parallel_config.pipeline_parallel_size
    name = load.load_format
    if name == "dummy":
        yield None
    elif name in ("auto", "bitsandbytes", "safetensors", "pt", "gguf"):
        kind = "auto" if name == "bitsandbytes" else name  # the same files
        checkpoint = find_checkpoint(folder, kind, load.pt_load_map_location)
        if checkpoint.kind != "pt" and load.pt_load_map_location != "cpu" and rank == 0:
            logger.warning("pt_load_map_location has no effect: the weights are %s files.", checkpoint.kind)
        yield checkpoint.tensors(progress=load.use_tqdm_on_load and rank == 0)
    elif name == "npcache":
        yield cached_tensors(folder)
    elif name == "sharded_state":
        yield rank_state.open_files(folder, rank, load.model_loader_extra_config.get("pattern"))
    elif name == "tensorizer":
        from vllm.model_executor.model_loader import tensorizer

        settings = tensorizer.TensorizerConfig.of(load.model_loader_extra_config)
        with tensorizer.opened(settings, rank, world, device) as weights:
            yield weights
    else:
        raise ValueError(f"load_format={name!r} is not supported.")
