"""Batch inference over a data set with Ray Data: copies of a model, each in an actor, answer batches of prompts.

    pip install '.[ray]'
    python examples/offline_inference_distributed.py --model demo --copies 2

The data set is read, divided and written by Ray, block by block, so that it may be larger than memory; copies that die
are started again and their batches repeated. On a cluster, run it on any node (RAY_ADDRESS tells which cluster). With
`--tensor-parallel-size` above 1 every copy spreads over so many GPUs of its node.
"""

import argparse

import ray

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


class Answer:
    """One copy of the model; Ray calls it with batches of the data set."""

    def __init__(self, args):
        from vllm import LLM, SamplingParams

        self.params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, detokenize=not args.skip_tokenizer)
        self.llm = LLM(
            args.model, tensor_parallel_size=args.tensor_parallel_size, skip_tokenizer_init=args.skip_tokenizer
        )

    def __call__(self, batch):
        if "ids" in batch:
            prompts = [{"prompt_token_ids": [int(i) for i in ids]} for ids in batch["ids"]]
        else:
            prompts = list(batch["text"])
        outputs = self.llm.generate(prompts, self.params, use_tqdm=False)
        batch["answer"] = [output.outputs[0].text or str(list(output.outputs[0].token_ids)) for output in outputs]
        return batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--copies", type=int, default=1, help="models that work side by side")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of each copy")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--output", help="folder for the answers, as Parquet")
    parser.add_argument("--skip-tokenizer", action="store_true", help="prompts are token ids, as are answers")
    args = parser.parse_args()

    ray.init()
    gpus = args.tensor_parallel_size if ray.cluster_resources().get("GPU") else 0
    if args.skip_tokenizer:
        rows = [{"ids": [5 + i % 50, 6, 7]} for i in range(args.rows)]
    else:
        rows = [{"text": PROMPTS[i % len(PROMPTS)]} for i in range(args.rows)]
    data = ray.data.from_items(rows).map_batches(
        Answer,
        fn_constructor_args=(args,),
        concurrency=args.copies,
        batch_size=args.batch_size,
        num_gpus=gpus,
        num_cpus=1,
    )
    if args.output:
        data.write_parquet(args.output)
        return
    answers = data.take_all()
    for row in answers[:8]:
        print(f"{row.get('text', row.get('ids'))!r} -> {row['answer']!r}")
    print(f"{len(answers)} answers")


if __name__ == "__main__":
    main()
