"""A chat page over the OpenAI-compatible server. Needs `pip install gradio openai`.

vllm serve
python examples/gradio_openai_chatbot_webserver.py --model demo
"""

import argparse
from collections.abc import Iterator
from typing import Any

try:
    from openai import OpenAI
except ModuleNotFoundError:
    raise SystemExit("This example needs a client: pip install openai") from None

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def to_messages(message: str, history: list[Any]) -> list[dict[str, str]]:
    """The conversation in OpenAI's format; gradio gives past turns as pairs (older) or as messages (newer)."""
    messages = [SYSTEM]
    for turn in history:
        if isinstance(turn, dict):
            messages.append({"role": turn["role"], "content": turn["content"]})
        else:
            question, answer = turn
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": message}]


def answers(
    client: OpenAI, model: str, temperature: float, stop_token_ids: list[int], message: str, history: list[Any]
) -> Iterator[str]:
    """The answer so far, each time it has grown."""
    stream = client.chat.completions.create(
        model=model,
        messages=to_messages(message, history),  # type: ignore[arg-type]
        temperature=temperature,
        stream=True,
        extra_body={"repetition_penalty": 1, "stop_token_ids": stop_token_ids},
    )
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        yield text


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat page.")
    parser.add_argument("--model-url", default="http://localhost:8000/v1", help="Address of the API.")
    parser.add_argument("-m", "--model", required=True, help="Name of the model.")
    parser.add_argument("--temp", type=float, default=0.8, help="Sampling temperature.")
    parser.add_argument("--stop-token-ids", default="", help="Token ids that end an answer, separated by commas.")
    parser.add_argument("--host", default=None)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--share", action="store_true", help="Publish the page through gradio's servers.")
    args = parser.parse_args()
    try:
        import gradio
    except ImportError:
        raise SystemExit("This example needs gradio: pip install gradio") from None

    client = OpenAI(api_key="EMPTY", base_url=args.model_url)
    stop_token_ids = [int(text) for text in args.stop_token_ids.split(",") if text.strip()]

    def predict(message: str, history: list[Any]) -> Iterator[str]:
        yield from answers(client, args.model, args.temp, stop_token_ids, message, history)

    gradio.ChatInterface(predict).queue().launch(server_name=args.host, server_port=args.port, share=args.share)


if __name__ == "__main__":
    main()
