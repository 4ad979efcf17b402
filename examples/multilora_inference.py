"""Two LoRA adapters and their base model, step by step. Usage: multilora_inference.py [MODEL ADAPTER]"""

from __future__ import annotations

import sys

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest

Work = list[tuple[str, SamplingParams, LoRARequest | None]]


def create_requests(adapter: str) -> Work:
    """The same questions for the base model and for two adapters, which are one under two names here.

    Only one adapter may be in a step (`max_loras=1`), so the second one's requests wait for the first one's.
    """
    first, second = LoRARequest("pirate", 1, adapter), LoRARequest("pirate-2", 2, adapter)
    greedy = SamplingParams(temperature=0.0, max_tokens=48)
    several = SamplingParams(n=2, temperature=0.8, top_k=5, max_tokens=48)
    return [
        ("What is the capital of France?", greedy, None),
        ("What is the capital of France?", greedy, first),
        ("Who wrote Hamlet?", greedy, second),
        ("Who wrote Hamlet?", several, first),
    ]


def run(engine: LLMEngine, work: Work) -> None:
    """Run all requests, adding one before each step, and print each when it has finished."""
    tokenizer = engine.get_tokenizer()
    waiting = list(enumerate(work))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, (question, params, adapter) = waiting.pop(0)
            messages = [{"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            engine.add_request(str(number), {"prompt_token_ids": ids}, params, lora_request=adapter)
        for output in engine.step():
            if output.finished:
                name = output.lora_request.lora_name if output.lora_request else "base"
                for answer in output.outputs:
                    print(f"{name}: {answer.text!r}")


def main(model: str = "demo", adapter: str = "demo-pirate") -> None:
    # max_loras: adapters in one step, each with memory for max_lora_rank; max_cpu_loras: adapters kept on the host.
    arguments = EngineArgs(
        model=model, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=64
    )
    run(LLMEngine.from_engine_args(arguments), create_requests(adapter))


if __name__ == "__main__":
    main(*sys.argv[1:])
