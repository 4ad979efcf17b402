"""Run as a program, outside of Triton's interpreter: do random steps need kernels that no dry run has asked for?

    python -m tests.worker.kernel_variants

Prints those, one a line. The steps are those of `DryRun`, with tensors that have no memory.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.jit import JITFunction

from vllm.config.hf import HFConfig
from vllm.config.quantization import Quantization
from vllm.model_executor.layers.quantization import format_of
from vllm.model_executor.layers.quantization.method import ModelQuantization
from vllm.model_executor.models.registry import ModelRegistry
from vllm.ops import triton as kernels
from vllm.ops.triton.decode_step import Drawing
from vllm.ops.triton.precompile import _Collector, _NoDevice
from vllm.worker.cuda_precompile import META, DryRun, _Table, mixed_step
from vllm.worker.decode_program import DecodeProgram, read_weights
from vllm.worker.static_steps import SPANS

COMMON = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4096,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
CONFIGS = (
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 4,
     "num_key_value_heads": 2, "head_dim": 128},
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 14,
     "num_key_value_heads": 2, "head_dim": 64},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_attention_heads": 8,
     "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 1000},
    {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2,
     "head_dim": 256, "sliding_window": 1000, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
     "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
    {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_attention_heads": 8,
     "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
)  # fmt: skip
STORED = (
    Quantization("gptq", "gptq", {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}),
    Quantization("awq", "awq", {"bits": 4, "group_size": 128, "zero_point": True}),
    Quantization("fp8", "fp8"),
)
QUANTIZED = ("qwen3", "mixtral")
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def random_steps(run: DryRun, rng: random.Random) -> None:
    model, layout, caches = run._model()
    for _ in range(40):
        rows = rng.choice((1, 1, 2, 5, 33))
        new = np.array([rng.choice((1, 1, 3, 9, 16, 17, 100, 480, 1536, 2048)) for _ in range(rows)], np.int32)
        cached = np.array([rng.choice((0, 0, 16, 900, 5000)) for _ in range(rows)], np.int32)
        hidden = model(mixed_step(new, layout, cached=np.where(new == 1, cached + 1, cached)), caches)
        model.logits(hidden[:rows])


def random_ends(run: DryRun, rng: random.Random) -> None:
    """Fused steps whose rows may have masks: those of graphs, greedy and drawn."""
    model, layout, caches = run._model()
    weights, largest, vocab = read_weights(model, caches), GRAPHS[-1], run._spec.vocab_size
    if weights is None:
        return
    inputs, ring = (torch.empty(n, largest, dtype=torch.int32, device=META) for n in (4, 8))
    masks = torch.empty(largest * (1 + -(-vocab // 32)), dtype=torch.int32, device=META)
    floats, starts = torch.empty(3, largest, device=META), torch.empty(largest, dtype=torch.int64, device=META)
    for _ in range(12):
        size = rng.choice(GRAPHS)
        slots, positions, turns, top_k = (inputs[i, :size] for i in range(4))
        temperature, min_p, top_p = (floats[i, :size] for i in range(3))
        drawing = Drawing(temperature, min_p, top_k, top_p, starts[:size]) if rng.random() < 0.5 else None
        hidden = torch.empty(size, weights.hidden_size, dtype=weights.dtype, device=META)
        program = DecodeProgram(weights, size, SPANS[0], slots, positions)
        table: Any = _Table(64, layout)
        program.run(table, hidden=hidden)
        program.finish(table, ring, turns, (masks[:size], masks[largest:].view(largest, -1)), drawing)


def missing(config: dict[str, object], stored: Quantization | None = None) -> list[str]:
    """Variants that random steps of a model need and its dry runs do not. stored: how its weights are."""
    hf = HFConfig.from_dict(config)
    family = ModelRegistry.resolve(hf.architectures)
    quantization = None
    if stored is not None:
        quantization = ModelQuantization(format_of(stored), family, packs_experts=True)
    run = DryRun(
        family.decoder(hf), torch.bfloat16, 8192, 16, torch.bfloat16, 64, GRAPHS, quantization=quantization
    )  # fmt: skip
    collector = _Collector()
    original, JITFunction.run = JITFunction.run, lambda self, *a, **k: collector(self, *a, **k)
    try:
        with torch.inference_mode():
            for dry_run in (run.first, run.larger, run.sampling):
                dry_run()
            collector.take()
            random_steps(run, random.Random(0))
            random_ends(run, random.Random(1))
        return sorted(f"{job[0].__name__} {job[2]}" for job in collector.take())
    finally:
        JITFunction.run = original


def main() -> None:
    triton.runtime.driver.set_active(_NoDevice(90))
    kernels.register("meta")
    for config in CONFIGS:
        for stored in (None, *STORED) if config["model_type"] in QUANTIZED else (None,):
            for variant in missing({**COMMON, **config}, stored):
                print(config["model_type"], "" if stored is None else stored.name, variant)


if __name__ == "__main__":
    main()
