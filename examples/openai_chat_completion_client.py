"""A chat with the official client: start `vllm serve` first."""

import argparse

try:
    from openai import OpenAI
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install openai") from None

parser = argparse.ArgumentParser(description="Ask a question that needs the turns before it.")
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--api-key", default="EMPTY", help="Any text, if the server has no key.")
args = parser.parse_args()

client = OpenAI(api_key=args.api_key, base_url=args.base_url)
model = client.models.list().data[0].id

chat_completion = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
    ],
)

print("Chat completion results:")
print(chat_completion)
