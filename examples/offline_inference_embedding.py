"""Embed four texts. Usage: offline_inference_embedding.py [MODEL]"""

import sys

from vllm import LLM

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main(model: str) -> None:
    # A model that was made to embed needs no task; any other is made to by it.
    llm = LLM(model=model, task="embed", enforce_eager=True)
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        vector = output.outputs.embedding
        shown = ", ".join(f"{number:.4f}" for number in vector[:4])
        print(f"Prompt: {prompt!r}, Embedding: [{shown}, ...] (size={len(vector)})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
