"""Completions with the official client: start `vllm serve` first."""

import argparse

try:
    from openai import OpenAI
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install openai") from None

parser = argparse.ArgumentParser(description="Continue a text, as a whole or as a stream.")
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--api-key", default="EMPTY", help="Any text, if the server has no key.")
parser.add_argument("--stream", action="store_true")
args = parser.parse_args()

client = OpenAI(api_key=args.api_key, base_url=args.base_url)
model = client.models.list().data[0].id

completion = client.completions.create(
    model=model,
    prompt="A robot may not injure a human being",
    n=2,
    logprobs=3,
    stream=args.stream,
)

print("Completion results:")
if args.stream:
    for chunk in completion:
        print(chunk)
else:
    print(completion)
