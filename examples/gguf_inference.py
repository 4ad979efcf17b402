"""Runs a GGUF file: settings, tokenizer and chat template are in it.

python examples/gguf_inference.py model.Q4_K_M.gguf
"""

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: gguf_inference.py FILE.gguf")
    llm = LLM(model=sys.argv[1])
    questions = ["What is the capital of France?", "How many legs has a spider?"]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))
    for question, output in zip(questions, outputs, strict=True):
        print(f"Question: {question}\nAnswer: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
