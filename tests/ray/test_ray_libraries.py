"""Ray's own libraries with this engine inside: Ray Data's processor for LLMs, unchanged, and Ray Serve.

`make test-ray` runs these, each in a program of its own with a cluster of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from vllm import LLM, SamplingParams
from vllm.metrics.registry import EngineMetrics
from vllm.step.messages import CoreStats

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "vllm/assets/demo"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}


def run(*command: object, seconds: float = 250) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=seconds, env=ENVIRONMENT, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_ray_datas_processor_runs_unchanged() -> None:
    """Chat template, tokens and sampling go through Ray's stages; the answers are those of `LLM`."""
    printed = run("examples/ray_data_llm.py", "--model", "demo", "--rows", 6, "--max-tokens", 6)
    llm, tokenizer = LLM(str(DEMO), max_model_len=512), AutoTokenizer.from_pretrained(DEMO)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in ("What is a cat?", "Name three colours.")
    ]
    prompts: Any = [{"prompt_token_ids": ids} for ids in tokenizer(texts)["input_ids"]]
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False):
        assert repr(output.outputs[0].text) in printed
    assert "6 answers" in printed


def test_ray_datas_processor_with_ranks_of_ray_and_with_embeddings() -> None:
    """Two ranks that share layers in the placement group of Ray's stage; then the same model, which embeds."""
    program = f"""
import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
ray.init("local", num_cpus=6, include_dashboard=False)

def answers(task, rows, name, **engine):
    config = vLLMEngineProcessorConfig(
        model_source={str(DEMO)!r}, task_type=task, engine_kwargs={{"max_model_len": 256, **engine}}, concurrency=1,
        batch_size=4, chat_template_stage=False, tokenize_stage=False, detokenize_stage=False,
        placement_group_config={{"bundles": [{{"CPU": 1}}] * engine.get("tensor_parallel_size", 1)}},
    )
    processor = build_processor(config, preprocess=lambda row: row, postprocess=lambda row: {{"found": row[name]}})
    return [row["found"] for row in processor(ray.data.from_items(rows)).take_all()]

sampling = {{"temperature": 0.0, "max_tokens": 5, "logprobs": 1}}
rows = [{{"prompt": f"The number {{i}} is", "sampling_params": sampling}} for i in range(4)]
print(sorted(answers("generate", rows, "generated_text", tensor_parallel_size=2)))
short = {{"truncation": True, "max_length": 3}}
cut = [{{"prompt": text, "tokenization_kwargs": short}} for text in ("Hello", "Yes " * 9)]
print([len(vector) for vector in answers("embed", cut, "embeddings")])
"""
    texts, widths = run("-c", program).strip().splitlines()[-2:]
    llm = LLM(str(DEMO), max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    outputs = llm.generate([f"The number {i} is" for i in range(4)], params, use_tqdm=False)
    assert texts == str(sorted(output.outputs[0].text for output in outputs))
    assert widths == str([llm.llm_engine.vllm_config.model_config.get_hidden_size()] * 2)


def test_an_asynchronous_engine_in_an_actor_uses_the_actors_placement_group() -> None:
    """There is nothing else: ranks that took places beside the group would wait for ever. It stays its owner's."""
    program = f"""
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm import SamplingParams

class Engine:
    def __init__(self, **settings):
        from vllm import AsyncEngineArgs, AsyncLLMEngine
        self.engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**settings))
    async def text(self, prompt):
        async for output in self.engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=5), prompt):
            pass
        return output.outputs[0].text
    async def stop(self):
        await self.engine.shutdown()

ray.init("local", num_cpus=2, include_dashboard=False)
group = ray.util.placement_group([{{"CPU": 1}}] * 2)
ray.get(group.ready())
strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
actor = ray.remote(num_cpus=0)(Engine).options(scheduling_strategy=strategy).remote(
    model={str(DEMO)!r}, max_model_len=256, tensor_parallel_size=2, distributed_executor_backend="ray")
print(ray.get([actor.text.remote(f"The number {{i}} is") for i in range(2)]))
ray.get(actor.stop.remote())
print(ray.util.placement_group_table(group)["state"])
"""
    texts, state = run("-c", program).strip().splitlines()[-2:]
    llm = LLM(str(DEMO), max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    outputs = llm.generate([f"The number {i} is" for i in range(2)], params, use_tqdm=False)
    assert texts == str([output.outputs[0].text for output in outputs])
    assert state == "CREATED"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_ray_serve_adds_replicas_while_there_is_load() -> None:
    """One replica becomes two, every request is answered, streams arrive piece by piece; one that dies is replaced."""
    port = free_port()
    command = [
        "examples/ray_serve.py", "--most", 2, "--requests", 1, "--upscale-delay", 1, "--port", port,
        "--", "--model", "demo", "--max-model-len", 512, "--max-num-seqs", 2,
    ]  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(server.stdout or ()), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 120
        while not any("Serving on" in line for line in lines):
            assert server.poll() is None and time.monotonic() < deadline, "".join(lines)[-4000:]
            time.sleep(0.2)

        def ask(stream: bool) -> bytes:
            body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True,
                    "temperature": 0, "stream": stream}  # fmt: skip
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bytes(answer.read())

        wanted = json.loads(ask(False))["choices"][0]["text"]
        headers = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}  # as a browser asks first
        preflight = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", None, headers, method="OPTIONS")
        assert urllib.request.urlopen(preflight, timeout=60).status == 200
        events = [line[6:] for line in ask(True).decode().splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == wanted and len(events) > 2
        stop, found = threading.Event(), []

        def load() -> None:
            while not stop.is_set():
                found.append(json.loads(ask(False))["choices"][0]["text"])

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 90
        while len(engines_below(server.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
        more = len(engines_below(server.pid))
        stop.set()
        for thread in threads:
            thread.join(60)
        assert more == 2
        assert len(found) > 8 and set(found) == {wanted}

        before = engines_below(server.pid)
        os.kill(before[0], signal.SIGKILL)  # Serve puts another replica in its place
        deadline = time.monotonic() + 90
        while len(set(engines_below(server.pid)) - {before[0]}) < 2:
            assert time.monotonic() < deadline, "".join(lines)[-4000:]
            time.sleep(0.5)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def engines_below(pid: int) -> list[int]:
    """Engine cores among the descendants of a process."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
        return [child.pid for child in children if "vllm.engine.core_process" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def test_metrics_become_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters grow by what has come since the last time; a histogram shows its sum and its count."""
    from ray.util import metrics as rays

    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    values: dict[str, float] = {}

    class Recorded:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.keys = name, tag_keys

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.keys)
            values[self.name] = values.get(self.name, 0.0) + value

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.keys)
            values[self.name] = value

    monkeypatch.setattr(rays, "Counter", Recorded)
    monkeypatch.setattr(rays, "Gauge", Recorded)
    source = EngineMetrics("m", 100, {})
    shown = RayPrometheusStatLogger(local_interval=0.0)
    shown.info("metrics", source)
    for prompt in (5, 7):
        stats = CoreStats(num_running=prompt, prompt_tokens=prompt, kv_blocks_total=10, kv_blocks_free=5)
        source.on_step(stats)
        source.time_to_first_token.observe(0.25)
        shown.log(stats)
        shown.log(stats)
    assert values["vllm_prompt_tokens_total"] == 12
    assert values["vllm_num_requests_running"] == 7
    assert values["vllm_time_to_first_token_seconds_sum"] == 0.5
    assert values["vllm_time_to_first_token_seconds_count"] == 2
