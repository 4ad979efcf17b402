"""A client of the demonstration server: `python -m vllm.entrypoints.api_server --model demo`, then run this.

That server is for trying things; `vllm serve` and the OpenAI clients are for everything else.
"""

import argparse
import json
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse


def post(url: str, prompt: str, n: int, stream: bool) -> HTTPResponse:
    """Ask for `n` continuations; beam search needs at least two beams."""
    body = {"prompt": prompt, "n": n, "use_beam_search": n > 1, "temperature": 0.0, "max_tokens": 16, "stream": stream}
    headers = {"content-type": "application/json", "user-agent": "api_client example"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=300)


def streamed_texts(response: HTTPResponse) -> Iterator[list[str]]:
    """The texts so far, again and again: JSON objects with a NUL byte after each."""
    rest = b""
    while data := response.read1(8192):
        *whole, rest = (rest + data).split(b"\0")
        for chunk in filter(None, whole):
            yield json.loads(chunk)["text"]


def clear_lines(count: int) -> None:
    """Take back the last lines on a terminal."""
    print("\x1b[1A\x1b[2K" * count, end="", flush=True)


def show(texts: list[str]) -> int:
    """Print one line per text; returns how many lines that were."""
    lines = [f"Beam candidate {i}: {text!r}" for i, text in enumerate(texts)]
    print("\n".join(lines), flush=True)
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the demonstration server to continue a text.")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt", default="San Francisco is a")
    parser.add_argument("--stream", action="store_true", help="Show the texts while they grow.")
    args = parser.parse_args()

    print(f"Prompt: {args.prompt!r}\n", flush=True)
    with post(f"http://{args.host}:{args.port}/generate", args.prompt, args.n, args.stream) as response:
        if args.stream:
            printed = 0
            for texts in streamed_texts(response):
                clear_lines(printed)
                printed = show(texts)
        else:
            show(json.load(response)["text"])


if __name__ == "__main__":
    main()
