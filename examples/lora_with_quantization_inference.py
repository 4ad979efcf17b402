"""A LoRA adapter on a quantized model. Usage: lora_with_quantization_inference.py [MODEL ADAPTER]"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main(model: str = "demo", adapter: str = "demo-pirate") -> None:
    # Adapters keep their own type (`lora_dtype`), whatever the base model's weights are stored as.
    for quantization in ("fp8", "bitsandbytes"):
        with LLM(
            model, quantization=quantization, enable_lora=True, max_lora_rank=8, gpu_memory_utilization=0.4
        ) as llm:
            for name, lora in (("base", None), ("pirate", LoRARequest("pirate", 1, adapter))):
                (output,) = llm.chat(
                    QUESTION, SamplingParams(temperature=0.0, max_tokens=48), lora_request=lora, use_tqdm=False
                )
                print(f"{quantization}, {name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
