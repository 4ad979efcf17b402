"""Offline inference with several copies of a model: each process runs one copy and answers its share of the prompts.

    python examples/offline_inference_data_parallel.py --model demo --data-parallel-size 2

On GPUs each copy gets devices of its own through CUDA_VISIBLE_DEVICES; on the CPU the copies share the cores.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

PROMPTS = [f"{what} number {i} is" for i in range(4) for what in ("The prime", "The square", "The name of planet")]


def answer(model, rank, size, tensor_parallel_size):
    first = rank * tensor_parallel_size
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if devices == [""]:
        devices = [str(i) for i in range(size * tensor_parallel_size)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + tensor_parallel_size])

    from vllm import LLM, SamplingParams

    mine = PROMPTS[rank::size]
    llm = LLM(model, tensor_parallel_size=tensor_parallel_size, data_parallel_size=size, data_parallel_rank=rank)
    outputs = llm.generate(mine, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    return [(output.prompt, output.outputs[0].text) for output in outputs]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data-parallel-size", type=int, default=2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()

    size = args.data_parallel_size
    with ProcessPoolExecutor(size, get_context("spawn")) as copies:  # a copy that fails raises here
        running = [copies.submit(answer, args.model, rank, size, args.tensor_parallel_size) for rank in range(size)]
        answers = dict(pair for copy in running for pair in copy.result())
    for prompt in PROMPTS:
        print(f"{prompt!r} -> {answers[prompt]!r}")
