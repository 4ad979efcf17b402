"""Writes the model card: what the model is, what it can do and how to make it again."""

from __future__ import annotations

from pathlib import Path

CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# {name}

{what}

It is a Llama-architecture language model with {parameters:,} parameters in bfloat16, a byte-level BPE
tokenizer of 4,096 tokens and a context of 2,048 tokens. It exists so that everything in this project can be
tried, tested and shown on a machine without a network and without a GPU.

## What it can do
It was trained only on English text that the scripts in `tools/demo_model/` write themselves from templates and
tables of facts: capitals and other facts, short stories, essays, small talk, small sums, JSON for a schema in
the prompt, and tool calls in the Hermes format. Within that world it answers sensibly; outside of it, it makes
things up. Do not use it for anything that matters.

Texts and turns end with `<|end|>`; the chat template knows system prompts, several turns, tools and tool
responses.

## How to make it again
    python -m tools.demo_model.train --out OUT {options}
    python -m tools.demo_model.check OUT/{name}

The text and its order depend on the seed alone. Training took {steps:,} steps ({tokens:,} tokens), AdamW, cosine
schedule, bfloat16 with float32 weights. At the end the weights were rounded to four significant bits, so that
the files compress well (the loss grows by less than 0.003). It takes minutes on one data-center GPU, much longer
on a CPU. Sums on a GPU are not repeatable bit for bit, so the weights of a second run differ a little.
"""

WHAT = {
    "demo": 'The demo model of this project (`model="demo"`).',
    "demo-draft": (
        'The draft sibling of the demo model (`model="demo-draft"`): the same tokenizer\n'
        "and text, a quarter of the size, for speculative decoding."
    ),
}


def write_card(folder: Path, notes: dict[str, object]) -> None:
    """Write ``README.md`` for a model that was trained with these settings."""
    text = CARD.format(what=WHAT[str(notes["name"])], **notes)
    (folder / "README.md").write_text(text, encoding="utf-8")
