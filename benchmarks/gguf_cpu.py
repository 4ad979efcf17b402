"""GGUF files on a CPU beside llama.cpp, in turns, with the same files: random weights in the shapes of small models.

    python -m benchmarks.gguf_cpu --peer /opt/llama/bin/python [--shapes 0.5b] [--types Q8_0 Q4_K_M] [--out x.json]

--peer: an interpreter that can import llama_cpp (`pip install llama-cpp-python`, which compiles for the machine). Both
engines get the same number of threads. Tokens per second, the median of what each reached in its turns; a case such
as 8x512/64 is eight prompts of 512 tokens and 64 more tokens of each, 1x1024/1 is a prompt, 1x16/64 is decoding. Start:
seconds from an engine's own import to a model that is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {  # hidden, inner, layers, heads, key/value heads
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "7b": (3584, 18944, 28, 28, 4),
}
VOCABULARY = 151936
_HALVES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # where a block's fp16 scales lie


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b"])
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K_M"])
    parser.add_argument("--cases", nargs="+", default=["1x16/64", "1x1024/1", "8x512/64", "32x128/128"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gguf-benchmark")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"threads": args.threads, "files": {}}
    for shape in args.shapes:
        for kind in args.types:
            file = args.folder / f"{shape}-{kind}.gguf"
            if not file.exists():
                write(file, SHAPES[shape], kind)
            engines = {
                name: _Engine(python, name, file, args.threads)
                for name, python in (("vllm", sys.executable), ("llama.cpp", args.peer))
            }
            found: dict[str, Any] = {"bytes": file.stat().st_size}
            found["start_s"] = {name: round(engine.ask("start"), 3) for name, engine in engines.items()}
            print(f"{file.name}: start {found['start_s']}", flush=True)
            for case in args.cases:
                speeds: dict[str, list[float]] = {name: [] for name in engines}
                for _ in range(args.turns):
                    for name, engine in engines.items():
                        speeds[name].append(_tokens(case) / engine.ask(case))
                middle = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
                found[case] = {**middle, "ratio": round(middle["vllm"] / middle["llama.cpp"], 3)}
                print(f"  {case}: {found[case]}", flush=True)
                result["files"][file.name] = found
                if args.out is not None:  # a run that is cut leaves what it has
                    args.out.write_text(json.dumps(result, indent=1))
            found["peak_mib"] = {name: round(engine.ask("memory")) for name, engine in engines.items()}
            for engine in engines.values():
                engine.close()
            result["files"][file.name] = found
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1))


def _sizes(case: str) -> tuple[int, int, int]:
    requests, _, rest = case.partition("x")
    prompt, _, out = rest.partition("/")
    return int(requests), int(prompt), int(out)


def _tokens(case: str) -> int:
    """What is counted: the tokens made, or those of the prompt where that is all there is."""
    requests, prompt, out = _sizes(case)
    return requests * (prompt if out == 1 else out)


def write(file: Path, sizes: tuple[int, int, int, int, int], kind: str) -> None:
    """A Qwen 2 model with random weights; `Q4_K_M`: Q4_K, and Q6_K where llama.cpp's mixture of that name has it."""
    import gguf
    import numpy as np

    hidden, inner, layers, heads, kv_heads = sizes
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen2", use_temp_file=True)
    for key, value in {
        "context_length": 32768, "embedding_length": hidden, "block_count": layers, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen2.rope.freq_base", 1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(VOCABULARY - 1)
    generator = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, type_: str) -> None:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
        if columns % block:
            raise ValueError(f"{name} has {columns} columns, which are not whole blocks of {type_}.")
        raw = generator.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
        small = (0.02 / {"Q8_0": 74, "Q4_K": 290, "Q6_K": 1100}[type_] * (1 + generator.random(len(raw)))).astype("<f2")
        for at in _HALVES[type_]:
            raw[:, at : at + 2] = small.view(np.uint8).reshape(-1, 2)
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[type_])

    def type_of(name: str, layer: int, columns: int) -> str:
        if kind != "Q4_K_M":
            return kind
        if columns % 256:
            return "Q8_0"  # llama.cpp falls back too where blocks of 256 do not fit
        first = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        return "Q6_K" if name in ("attn_v", "ffn_down") and first else "Q4_K"

    matrix("token_embd.weight", VOCABULARY, hidden, type_of("token_embd", 0, hidden).replace("Q4_K", "Q6_K"))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    head = hidden // heads
    for layer in range(layers):
        name = f"blk.{layer}"
        writer.add_tensor(f"{name}.attn_norm.weight", np.ones(hidden, np.float32))
        writer.add_tensor(f"{name}.ffn_norm.weight", np.ones(hidden, np.float32))
        for which, rows, columns in (
            ("attn_q", hidden, hidden), ("attn_k", kv_heads * head, hidden), ("attn_v", kv_heads * head, hidden),
            ("attn_output", hidden, hidden), ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):  # fmt: skip
            matrix(f"{name}.{which}.weight", rows, columns, type_of(which, layer, columns))
            if which in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"{name}.{which}.bias", np.zeros(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)


class _Engine:
    """A process that answers each line, the name of a case, with the seconds that it took."""

    def __init__(self, python: str, name: str, file: Path, threads: int) -> None:
        script = [python, __file__] if name == "llama.cpp" else [python, "-m", "benchmarks.gguf_cpu"]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
        if name == "llama.cpp":
            env.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [*script, "--serve", name, str(file), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip

    def ask(self, line: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("answer "):
                return float(answer.split()[1])
        raise RuntimeError(f"The engine ended before it answered {line!r}.")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve(name: str, file: str, threads: int) -> None:
    """Answer lines from standard input."""
    run = {"vllm": _vllm, "llama.cpp": _llama_cpp}[name](file, threads)
    for line in sys.stdin:
        case = line.strip()
        if case == "memory":
            status = Path("/proc/self/status").read_text()
            value = float(status.split("VmHWM:")[1].split()[0]) / 1024
        else:
            value = run(case)
        print(f"answer {value}", flush=True)


def _prompts(requests: int, length: int) -> list[list[int]]:
    """Tokens that differ from call to call, so that nobody finds them in a cache."""
    import random

    generator = random.Random(time.perf_counter_ns())
    return [generator.choices(range(1000, VOCABULARY - 1000), k=length) for _ in range(requests)]


def _vllm(file: str, threads: int) -> Any:
    import torch

    torch.set_num_threads(threads)
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(file, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, max_num_seqs=64)
    started = time.perf_counter() - begun

    def run(case: str) -> float:
        if case == "start":
            return started
        requests, length, out = _sizes(case)
        prompts = [{"prompt_token_ids": ids} for ids in _prompts(requests, length)]
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == out for output in outputs)
        return time.perf_counter() - begun

    return run


def _llama_cpp(file: str, threads: int) -> Any:
    begun = time.perf_counter()
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16384, 2048, 512, 32
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = True
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(2048, 0, 1)
    started = time.perf_counter() - begun

    def decode(tokens: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, whether its logits are wanted) of each."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed.")

    def best(index: int) -> int:
        logits = lib.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (VOCABULARY,)).argmax())

    def run(case: str) -> float:
        if case == "start":
            return started
        requests, length, out = _sizes(case)
        prompts = _prompts(requests, length)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        begun = time.perf_counter()
        newest, room = {}, 2048
        pending: list[tuple[int, int, int, bool]] = []
        for sequence, ids in enumerate(prompts):
            if len(pending) + length > room:
                decode(pending)
                newest.update({s: best(i) for i, (_, _, s, wanted) in enumerate(pending) if wanted})
                pending = []
            pending += [(token, i, sequence, i + 1 == length) for i, token in enumerate(ids)]
        decode(pending)
        newest.update({s: best(i) for i, (_, _, s, wanted) in enumerate(pending) if wanted})
        for step in range(out - 1):
            decode([(newest[s], length + step, s, True) for s in range(requests)])
            newest = {s: best(s) for s in range(requests)}
        return time.perf_counter() - begun

    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
