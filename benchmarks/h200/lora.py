"""Decode and prefill with LoRA adapters on one GPU: `python -m benchmarks.h200.lora --model FOLDER [--out FILE]`.

The model has random weights, the adapters have rank 16 on all linear layers. Times of one step at batch 32: all
requests of the base model, all of one adapter, of eight adapters in turn; and the prefill of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

ADAPTERS, BATCH, STEPS = 8, 32, 96


def write_adapters(config: dict[str, Any], root: Path, rank: int) -> list[LoRARequest]:
    """Random adapters of all linear layers of a Llama-like model."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [n.split(".")[1] for n in shapes]}
    requests = []
    for number in range(1, ADAPTERS + 1):
        folder = root / str(number)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (inputs, outputs) in shapes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, inputs) / inputs**0.5).bfloat16()
                tensors[f"{prefix}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.01).bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        requests.append(LoRARequest(f"adapter-{number}", number, str(folder)))
    return requests


def step_ms(llm: LLM, requests: list[LoRARequest | None]) -> float:
    """Milliseconds of a decode step, the batch's requests using `requests` in turn: long answers less short ones."""
    chosen = [requests[i % len(requests)] for i in range(BATCH)]
    prompts = [{"prompt_token_ids": [(7 * i + j) % 5000 + 10 for j in range(16)]} for i in range(BATCH)]

    def run(tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        begun = time.perf_counter()
        llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)
        return time.perf_counter() - begun

    for _ in range(2):
        run(24)
    return min((run(16 + STEPS) - run(16)) / STEPS for _ in range(4)) * 1e3


def print_kernels(llm: LLM, requests: list[LoRARequest | None]) -> None:
    """What takes the device's time in decode steps."""
    from torch.profiler import ProfilerActivity, profile

    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(10, 26))} for _ in range(BATCH)]
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(prompts, params, lora_request=[requests[i % len(requests)] for i in range(BATCH)], use_tqdm=False)
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=60))


def prefill_s(llm: LLM, request: LoRARequest | None) -> float:
    params = SamplingParams(temperature=0, max_tokens=1)
    times = []
    for turn in range(4):
        prompt = {"prompt_token_ids": [(11 * j + 131 * turn) % 5000 + 10 for j in range(8192)]}
        begun = time.perf_counter()
        llm.generate(prompt, params, lora_request=request, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json of a Llama-like model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--profile", action="store_true", help="also print what takes the device's time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        requests = write_adapters(json.loads((args.model / "config.json").read_text()), Path(root), args.rank)
        llm = LLM(
            str(args.model), load_format="dummy", skip_tokenizer_init=True, enable_lora=True, max_loras=ADAPTERS,
            max_lora_rank=args.rank, max_cpu_loras=ADAPTERS, max_model_len=16384, max_num_batched_tokens=8192,
            enable_prefix_caching=False, max_num_seqs=64,
        )  # fmt: skip
        found = {
            "base_ms": step_ms(llm, [None]),
            "one_ms": step_ms(llm, [requests[0]]),
            "eight_ms": step_ms(llm, list(requests)),
            "half_ms": step_ms(llm, [None, requests[0]]),
            "prefill_base_s": prefill_s(llm, None),
            "prefill_one_s": prefill_s(llm, requests[0]),
        }
        if args.profile:
            print_kernels(llm, [requests[0]])
            print_kernels(llm, list(requests))
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps({"model": args.model.name, "rank": args.rank, "batch": BATCH, **found}) + "\n")


if __name__ == "__main__":
    main()
