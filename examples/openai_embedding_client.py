"""Embeddings with the official client: start `vllm serve MODEL` first (`--task embed` if the model generates)."""

import argparse

try:
    from openai import OpenAI
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install openai") from None

parser = argparse.ArgumentParser(description="Embed two texts.")
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--api-key", default="EMPTY", help="Any text, if the server has no key.")
args = parser.parse_args()

client = OpenAI(api_key=args.api_key, base_url=args.base_url)
model = client.models.list().data[0].id

answer = client.embeddings.create(
    input=["Hello my name is", "The best thing about vLLM is that it supports many different models"],
    model=model,
)
for item in answer.data:
    print(item.embedding)
