"""Complete four prompts. Usage: offline_inference.py [MODEL]"""

import sys

from vllm import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main(model: str) -> None:
    llm = LLM(model=model)
    # One call for all prompts: they run together.
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
