"""Rank texts by their likeness to a question. Usage: offline_inference_scoring.py [MODEL]

A cross-encoder (BAAI/bge-reranker-v2-m3, say) reads question and text together; of any other model, the score is the
cosine of two embeddings.
"""

import sys

from vllm import LLM

QUESTION = "What is the capital of France?"
TEXTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris.", "Bread is made of flour and water."]


def main(model: str) -> None:
    llm = LLM(model=model, **({"task": "embed"} if model == "demo" else {}))
    outputs = llm.score(QUESTION, TEXTS)
    ranked = sorted(zip(TEXTS, outputs, strict=True), key=lambda pair: -pair[1].outputs.score)
    for text, output in ranked:
        print(f"Score: {output.outputs.score:.4f}, Text: {text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
