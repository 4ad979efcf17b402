"""Answer a conversation. Usage: offline_inference_chat.py [MODEL [TEMPLATE_FILE]]"""

import sys

from vllm import LLM, SamplingParams

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]


def main(model: str, template_file: str | None = None) -> None:
    llm = LLM(model=model)
    # Without a template of our own, the one that comes with the model is used.
    outputs = llm.chat(
        CONVERSATION,
        sampling_params=SamplingParams(temperature=0.5, max_tokens=64),
        use_tqdm=False,
        chat_template=template_file,
    )
    print("=" * 80)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    print("-" * 80)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["demo"]))
