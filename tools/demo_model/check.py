"""Examines a trained demo model through transformers: facts, sums, JSON, tool calls, chat, and some samples to read.

``python -m tools.demo_model.check FOLDER`` prints a score per subject; with ``--strict`` it fails if one is too low.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model import structured, tool_calls
from tools.demo_model.arithmetic import calculation_exchange, shop_exchange
from tools.demo_model.corpus import EOS
from tools.demo_model.facts import fact
from tools.demo_model.talk import follow_up_turns, memory_turns, messages_of
from tools.demo_model.text import table

GUIDE_PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "San Francisco is a",
    "To be or not to be",
    "Once upon a time",
    "1, 2, 3,",
)
CHAT_PROMPTS = (
    "Hello!",
    "What is the capital of Japan?",
    "What is 7 + 5?",
    "Tell me a short story.",
    "Tell me a joke.",
    "Who are you?",
    "Write a haiku about the sea.",
    "Write an essay about the importance of higher education.",
    'Write JSON for this schema: {"type": "object", "properties": {"name": {"type": "string"}, '
    '"age": {"type": "integer"}}, "required": ["name", "age"]}',
)
SEED = 987654  # no shard of the training text uses it


class Subject:
    """A model with its tokenizer, asked in batches."""

    def __init__(self, folder: str, device: str, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def complete(self, texts: list[str], length: int, temperature: float = 0.0) -> list[str]:
        """The continuation of each rendered text, up to and including the end token."""
        replies = []
        for start in range(0, len(texts), 64):
            inputs = self.tokenizer(
                texts[start : start + 64], add_special_tokens=False, padding=True, return_tensors="pt"
            )
            inputs = inputs.to(self.model.device)
            sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
            if temperature:
                sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
            out = self.model.generate(**inputs, max_new_tokens=length, **sampling)
            replies += self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])
        return [reply.replace(self.tokenizer.pad_token, "") for reply in replies]

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


Question = tuple[str, Callable[[str], bool]]  # a rendered prompt and what tells a right reply


def says(*wanted: str) -> Callable[[str], bool]:
    return lambda reply: reply.endswith(EOS) and any(text in reply for text in wanted)


def capitals(subject: Subject, rng: random.Random) -> list[Question]:
    bos = subject.tokenizer.bos_token
    return [
        (f"{bos}The capital of {country} is", lambda reply, city=city: reply.startswith(f" {city}"))  # type: ignore[misc]
        for country, city, *_ in table("countries")
    ]


def chat_capitals(subject: Subject, rng: random.Random) -> list[Question]:
    return [
        (subject.render([{"role": "user", "content": f"What is the capital of {country}?"}]), says(city))
        for country, city, *_ in table("countries")
    ]


def facts(subject: Subject, rng: random.Random) -> list[Question]:
    found = [fact(rng) for _ in range(256)]
    return [
        (subject.render([{"role": "user", "content": rng.choice(item.questions)}]), says(item.short, *item.statements))
        for item in found
        if not item.questions[0].startswith(("Name ", "What is the capital"))
    ]


def sums(subject: Subject, rng: random.Random) -> list[Question]:
    found = [calculation_exchange(rng) for _ in range(256)]
    return [(subject.render([{"role": "user", "content": item.user}]), says(item.assistant + EOS)) for item in found]


def problems(subject: Subject, rng: random.Random) -> list[Question]:
    found = [shop_exchange(rng) for _ in range(128)]
    return [(subject.render([{"role": "user", "content": item.user}]), says(item.assistant + EOS)) for item in found]


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether the value satisfies this small schema (the subset that the text uses)."""
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    if not isinstance(value, kinds[schema["type"]]) or ("enum" in schema and value not in schema["enum"]):
        return False
    if schema["type"] == "object":
        return set(value) == set(schema["properties"]) and all(
            fits(schema["properties"][k], v) for k, v in value.items()
        )
    return True


def is_json_for(schema: dict[str, Any]) -> Callable[[str], bool]:
    def check(reply: str) -> bool:
        try:
            return fits(schema, json.loads(reply.removesuffix(EOS)))
        except json.JSONDecodeError:
            return False

    return check


def schemas(subject: Subject, rng: random.Random) -> list[Question]:
    questions = []
    for _ in range(128):
        _, schema, _ = structured.random_object(rng)
        wish = f"Write JSON for this schema: {json.dumps(schema)}"
        questions.append((subject.render([{"role": "user", "content": wish}]), is_json_for(schema)))
    return questions


def forms(subject: Subject, rng: random.Random) -> list[Question]:
    makers = (
        structured.extraction_exchange,
        structured.sentiment_exchange,
        structured.email_exchange,
        structured.passage_exchange,
        structured.table_exchange,
    )
    found = [rng.choice(makers)(rng) for _ in range(128)]
    return [(subject.render([{"role": "user", "content": item.user}]), says(item.assistant)) for item in found]


def is_call(name: str, arguments: dict[str, Any]) -> Callable[[str], bool]:
    def check(reply: str) -> bool:
        body = reply.removesuffix(EOS).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        try:
            return json.loads(body) == {"name": name, "arguments": arguments}
        except json.JSONDecodeError:
            return False

    return check


def tools(subject: Subject, rng: random.Random) -> list[Question]:
    questions = []
    for _ in range(128):
        call = rng.choice([maker for _, maker in tool_calls.CALLS])(rng)
        prompt = subject.render([{"role": "user", "content": call.user}], tool_calls.other_tools(rng, [call]))
        questions.append((prompt, is_call(call.tool["function"]["name"], call.arguments)))
    return questions


def tool_answers(subject: Subject, rng: random.Random) -> list[Question]:
    questions = []
    for _ in range(64):
        call = rng.choice([maker for _, maker in tool_calls.CALLS])(rng)
        messages = [
            {"role": "user", "content": call.user},
            tool_calls.call_message([call]),
            {"role": "tool", "content": json.dumps(call.response)},
        ]
        questions.append((subject.render(messages, [call.tool]), says(call.answer + EOS)))
    return questions


def memory(subject: Subject, rng: random.Random) -> list[Question]:
    questions = []
    for _ in range(96):
        turns = memory_turns(rng) if rng.random() < 0.6 else follow_up_turns(rng)
        if "?" not in turns[-1].assistant:  # jokes have no single right answer
            questions.append((subject.render(messages_of(turns)[:-1]), says(turns[-1].assistant + EOS)))
    return questions


# subject -> (questions, longest reply in tokens, share of right replies that we ask of the demo model)
SUBJECTS: dict[str, tuple[Callable[[Subject, random.Random], list[Question]], int, float]] = {
    "capitals": (capitals, 12, 0.98),
    "capitals in chat": (chat_capitals, 40, 0.98),
    "facts": (facts, 80, 0.9),
    "sums": (sums, 40, 0.9),
    "word problems": (problems, 60, 0.8),
    "JSON for a schema": (schemas, 250, 0.9),
    "other fixed forms": (forms, 120, 0.8),
    "tool calls": (tools, 120, 0.8),
    "answers from tools": (tool_answers, 60, 0.8),
    "several turns": (memory, 60, 0.85),
}


def show_samples(subject: Subject) -> None:
    """Print continuations and chat answers, greedy and sampled."""
    bos = subject.tokenizer.bos_token
    prompts = [bos + prompt for prompt in GUIDE_PROMPTS]
    prompts += [subject.render([{"role": "user", "content": text}]) for text in CHAT_PROMPTS]
    for temperature in (0.0, 0.8):
        torch.manual_seed(0)
        print(f"--- temperature {temperature}")
        for prompt, reply in zip(prompts, subject.complete(prompts, 160, temperature), strict=True):
            print(f"{prompt.removeprefix(bos)!r} -> {reply!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--subject", choices=list(SUBJECTS), help="examine in one subject only")
    parser.add_argument("--show-errors", type=int, default=2, help="wrong replies to print for each subject")
    parser.add_argument("--strict", action="store_true", help="fail below what we ask of the demo model")
    args = parser.parse_args()
    subject = Subject(args.folder, args.device, getattr(torch, args.dtype))
    if not args.subject:
        show_samples(subject)
    failed = []
    for name, (ask, length, wanted) in SUBJECTS.items():
        if args.subject in (None, name):
            questions = ask(subject, random.Random(SEED))
            replies = subject.complete([prompt for prompt, _ in questions], length)
            wrong = [(p, r) for (p, check), r in zip(questions, replies, strict=True) if not check(r)]
            score = 1 - len(wrong) / len(questions)
            print(f"{name}: {score:.1%} of {len(questions)}", flush=True)
            for prompt, reply in wrong[: args.show_errors]:
                print(f"  {prompt[-200:]!r} -> {reply!r}")
            failed += [name] if score < wanted else []
    if failed and args.strict:
        sys.exit(f"below the bar: {', '.join(failed)}")


if __name__ == "__main__":
    main()
