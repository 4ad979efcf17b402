"""Processes that torchrun has started: each runs the whole program, and those of one engine give the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm
from tests.distributed.workload import answers, differences, engine
from tests.executor.test_pipeline import save
from tests.lora.adapters import save_adapter
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams

DEMO = Path(vllm.__file__).parent / "assets" / "demo"
# Its ranks find other times, hashes and ids: the second one's clocks jump, and it reads adapters slowly.
UNLIKE = """
import json, os, random, sys, time
from pathlib import Path
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
rank = int(os.environ["RANK"])
if rank:
    rng = random.Random(0)
    for name in ("time", "monotonic", "perf_counter", "thread_time"):
        def jumping(clock=getattr(time, name), offset=[0.0]):
            offset[0] += rng.choice([0.0, 1e-4, 0.3])
            return clock() + offset[0]
        setattr(time, name, jumping)
    from vllm.worker.worker import Worker
    loaded, calls = Worker.loaded_adapters, []
    def slow(worker):
        calls.append(None)
        return loaded(worker) if len(calls) % 50 == 0 else []
    Worker.loaded_adapters = slow
from tests.executor.test_external_launcher import mixed_answers
found = mixed_answers(folder, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
Path(out, str(rank)).write_text(json.dumps(found))
"""

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


def mixed_answers(folder: Path, **settings: Any) -> list[Any]:
    """What a model says with and without adapters and grammars, to several sequences and to beams, and what becomes of
    requests that are wrong or are given up.
    """
    found: list[Any] = []
    with LLM(
        str(DEMO), device="cpu", dtype="float32", enable_lora=True, max_loras=1, max_num_seqs=4, block_size=8,
        max_model_len=192, max_num_batched_tokens=64, num_gpu_blocks_override=60, scheduler_delay_factor=0.5,
        **settings,
    ) as llm:  # fmt: skip
        adapters = [None, *(LoRARequest(f"a{i}", i + 1, str(folder / f"a{i}")) for i in range(2))]
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
        kinds: list[dict[str, Any]] = [
            {}, {"guided_decoding": GuidedDecodingParams(json=schema)}, {"n": 3, "temperature": 0.8, "seed": 1},
            {"guided_decoding": GuidedDecodingParams(choice=["a long answer", "another one"])}, {"logprobs": 2},
        ]  # fmt: skip
        for turn in range(2):
            params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **kinds[i % 5]}) for i in range(12)]
            prompts = [f"{'Numbers: 0 1 2' if i % 2 else 'Hello'} {i % 5}" for i in range(12)]
            loras = [adapters[(i + turn) % 3] for i in range(12)]
            outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
            found += [[list(one.token_ids) for one in output.outputs] for output in outputs]
        engine = llm.llm_engine
        for i in range(6):
            engine.add_request(
                str(i), "Hello", SamplingParams(temperature=0.0, max_tokens=4 + i), lora_request=adapters[1]
            )
        engine.step()
        engine.abort_request(["3", "5"])
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found.append([output.request_id, list(output.outputs[0].token_ids)])
        beams = llm.beam_search(["Hello"], BeamSearchParams(beam_width=3, max_tokens=6))
        found += [sequence.tokens for sequence in beams[0].sequences]
        found.append(engine.add_lora(LoRARequest("a2", 3, str(folder / "a2"))))
        found += [sorted(engine.list_loras()), engine.remove_lora(3), engine.remove_lora(3), llm.reset_prefix_cache()]
        for wrong in (LoRARequest("a0", 1, str(folder / "a1")), LoRARequest("none", 9, str(folder))):
            with pytest.raises(ValueError, match=r"already stands|failed|[Nn]o ") as caught:
                engine.add_lora(wrong)
            found.append(str(caught.value))
        found.append(engine._client.stats().prefix_cache_queries > 0)
    return found


def launched(
    tmp_path: Path, folder: Path, processes: int, size: int, own_group: str = "", text: str = PROGRAM
) -> list[Any]:
    """What each process has written; RuntimeError with what they said if they failed."""
    program = tmp_path / "program.py"
    program.write_text(text)
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


def test_ranks_that_find_other_times_give_the_answers_of_one_process(tmp_path: Path) -> None:
    for i in range(3):
        save_adapter(DEMO, tmp_path / f"a{i}", targets=["q_proj", "v_proj"], seed=i)
    expected = json.loads(json.dumps(mixed_answers(tmp_path)))
    assert launched(tmp_path, tmp_path, 2, 2, text=UNLIKE) == [expected, expected]


def test_ranks_that_are_asked_something_else_are_told(tmp_path: Path) -> None:
    other = PROGRAM.replace("found = answers(llm, 4", "found = answers(llm, 4 + dist.get_rank()")
    with pytest.raises(RuntimeError, match="This rank was given other requests than the first one") as caught:
        launched(tmp_path, save("gpt2", tmp_path / "model"), 2, 2, text=other)
    assert "asks its engine to abort" not in str(caught.value)  # which would hide it


def test_copies_are_counted_by_the_launcher() -> None:
    with pytest.raises(ValueError, match="leave it out. Each tensor_parallel_size processes of the launcher are one"):
        engine(DEMO, data_parallel_size=2, distributed_executor_backend="external_launcher")


def test_processes_that_do_not_make_whole_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="3 processes, which is no multiple of tensor_parallel_size=2"):
        launched(tmp_path, save("gpt2", tmp_path / "model"), 3, 2)
