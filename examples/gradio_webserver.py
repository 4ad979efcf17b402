"""A text box that continues what is typed, over the demonstration server's stream. Needs `pip install gradio`.

python -m vllm.entrypoints.api_server --model demo
python examples/gradio_webserver.py
"""

import argparse
import json
import urllib.request
from collections.abc import Iterator
from typing import Any


def continuations(url: str, prompt: str) -> Iterator[str]:
    """The text so far, each time it has grown."""
    body = json.dumps({"prompt": prompt, "stream": True, "max_tokens": 128}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    rest = b""
    with urllib.request.urlopen(request, timeout=300) as response:
        while data := response.read1(8192):
            *whole, rest = (rest + data).split(b"\0")
            for chunk in filter(None, whole):
                yield json.loads(chunk)["text"][0]


def build(url: str) -> Any:
    """The page."""
    try:
        import gradio
    except ImportError:
        raise SystemExit("This example needs gradio: pip install gradio") from None

    with gradio.Blocks() as page:
        gradio.Markdown("# Text completion")
        typed = gradio.Textbox(label="Input", placeholder="Type a text, then press Enter")
        answer = gradio.Textbox(label="Output", placeholder="The model's continuation")

        def on_enter(prompt: str) -> Iterator[str]:
            yield from continuations(url, prompt)

        typed.submit(on_enter, [typed], [answer])
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="A page for text completion.")
    parser.add_argument("--host", default=None)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--model-url", default="http://localhost:8000/generate")
    parser.add_argument("--share", action="store_true", help="Publish the page through gradio's servers.")
    args = parser.parse_args()
    build(args.model_url).queue().launch(server_name=args.host, server_port=args.port, share=args.share)


if __name__ == "__main__":
    main()
