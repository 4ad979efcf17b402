"""One rank of test_tensor_parallel.py: runs each model folder on its shard and saves the logits."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.models.harness import PagedDriver, load
from tests.models.own_models import OldLlamaForCausalLM
from vllm.distributed import TensorParallel
from vllm.model_executor.models import ModelRegistry

DUMMY = ("mixtral", "opt-350m", "gemma2", "transformers-moe")  # also run with random weights


def model_impl(case: str) -> str:
    """Whose code runs the case."""
    return "transformers" if case.startswith("transformers-") else "vllm"


def main(rank: int, world: int, work: Path) -> None:
    torch.set_num_threads(1)
    ModelRegistry.register_model("MyLlama", OldLlamaForCausalLM)
    dist.init_process_group(
        "gloo", init_method=f"file://{work}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    tp = TensorParallel(rank, world, dist.group.WORLD)
    prompts = torch.load(work / "prompts.pt", weights_only=True)
    for folder in sorted(path for path in work.iterdir() if path.is_dir()):
        for load_format in ("auto", "dummy") if folder.name in DUMMY else ("auto",):
            model = load(folder, tp=tp, load_format=load_format, model_impl=model_impl(folder.name))
            logits = PagedDriver(model, requests=len(prompts)).run(prompts, [15, 20])
            torch.save(logits, folder / f"{load_format}-{world}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
