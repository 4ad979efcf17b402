"""Batch inference with Ray Data's own processor for LLMs, which runs this engine in its actors.

    pip install '.[ray]'
    python examples/ray_data_llm.py --model ./my-model --copies 2

`ray.data.llm` applies the chat template, generates and joins the answers to the rows of a data set of any size; actors
that die are started again. On a host without GPUs every copy takes one CPU.
"""

import argparse

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

from vllm.config.model_source import is_local, resolve

QUESTIONS = ["What is a cat?", "Name three colours.", "How far is the moon?", "Who wrote Faust?"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help='folder, name of a repository, or "demo"')
    parser.add_argument("--copies", type=int, default=1, help="models that work side by side")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=512)
    args = parser.parse_args()

    ray.init()
    on_gpus = bool(ray.cluster_resources().get("GPU"))
    config = vLLMEngineProcessorConfig(
        model_source=str(resolve(args.model).resolve()) if is_local(args.model) else args.model,
        engine_kwargs={"max_model_len": args.max_model_len},
        concurrency=args.copies,
        batch_size=args.batch_size,
        placement_group_config=None if on_gpus else {"bundles": [{"CPU": 1}]},
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "messages": [{"role": "user", "content": row["question"]}],
            "sampling_params": {"temperature": 0.0, "max_tokens": args.max_tokens},
        },
        postprocess=lambda row: {"question": row["question"], "answer": row["generated_text"]},
    )
    rows = [{"question": QUESTIONS[i % len(QUESTIONS)]} for i in range(args.rows)]
    answers = processor(ray.data.from_items(rows)).take_all()
    for row in answers[:8]:
        print(f"{row['question']!r} -> {row['answer']!r}")
    print(f"{len(answers)} answers")


if __name__ == "__main__":
    main()
