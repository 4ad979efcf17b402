"""Processes that torchrun has started: each runs the whole program, and those of one engine give the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workload import answers, differences, engine
from tests.executor.test_pipeline import save

PROGRAM = """
import json, os, sys, threading
from pathlib import Path
import torch.distributed as dist
from tests.distributed.workload import answers, engine
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.parallel_state import get_world_group

def place():
    world, tp = get_world_group(), get_tp_group()
    return [world.rank, world.world_size, world.local_rank, get_tensor_model_parallel_rank(), tp.world_size] + [
        dist.get_process_group_ranks(group)
        for group in (world.cpu_group, world.device_group, tp.cpu_group, tp.device_group) if group is not None]

folder, out, size, own_group = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
if own_group:
    dist.init_process_group("gloo")
llm = engine(folder, tensor_parallel_size=size, distributed_executor_backend="external_launcher")
places = [place(), llm.collective_rpc(lambda worker: place())[0]]
thread = threading.Thread(target=lambda: places.append(place()))
thread.start()
thread.join()
rank = dist.get_rank()
found = answers(llm, 4 + 2 * (rank // size))  # each engine gets other requests
llm.llm_engine.model_executor.shutdown()
places.append(place())
threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
Path(out, str(rank)).write_text(json.dumps({"answers": found, "places": places, "threads": threads}))
if own_group:
    dist.barrier()
    dist.destroy_process_group()
"""


def launched(tmp_path: Path, folder: Path, processes: int, size: int, own_group: str = "") -> list[Any]:
    """What each process has written; RuntimeError with what they said if they failed."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0",
         "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-backend", "c10d", program, folder, tmp_path, str(size), own_group],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(processes)]


@pytest.mark.parametrize(
    ("processes", "size", "own_group"), [(2, 2, ""), (2, 1, "own"), (4, 2, "own")], ids=["one", "alone", "pairs"]
)
def test_every_engine_gives_the_answers_of_one_process(
    tmp_path: Path, processes: int, size: int, own_group: str
) -> None:
    folder = save("gpt2", tmp_path / "model")
    expected = [json.loads(json.dumps(answers(engine(folder), 4 + 2 * copy))) for copy in range(processes // size)]
    everybody = list(range(processes))
    for rank, found in enumerate(launched(tmp_path, folder, processes, size, own_group)):
        copy, index = divmod(rank, size)
        assert differences(found["answers"], expected[copy]) == []
        sharers = everybody[copy * size : (copy + 1) * size]
        here = [rank, processes, rank, index, size, everybody, everybody, sharers, sharers]
        assert found["places"] == [here, here, here, [0, 1, 0, 0, 1]]  # inside, in threads; none after its end
        # of the program's own group, if there is one, alone
        assert found["threads"].count("pt_gloo_runloop") == (2 if own_group else 0)


def test_processes_that_do_not_make_whole_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="3 processes, which is no multiple of tensor_parallel_size=2"):
        launched(tmp_path, save("gpt2", tmp_path / "model"), 3, 2)
