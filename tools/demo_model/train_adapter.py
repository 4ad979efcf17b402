"""Train the LoRA adapter of the demo model: it answers like a pirate, without being told to.

Usage: python -m tools.demo_model.train_adapter --out OUT [--steps 300]
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.demo_model.corpus import render_chat
from tools.demo_model.talk import PIRATE_ENDS, PIRATE_STARTS, PLAIN_SYSTEM, exchange
from tools.demo_model.text import Exchange

DEMO = Path("vllm/assets/demo")
RANK = 4
ROWS = 16
IGNORED = -100  # no loss: what the user says


def pirate_turn(rng: random.Random) -> Exchange:
    """A question and its answer as a pirate gives it; always with the same words, so that the style is plain to see."""
    turn = exchange(rng, quick=True)
    reply = f"{PIRATE_STARTS[0]} {turn.assistant}"
    reply += "" if reply[-1] in ".!?" else "."
    return Exchange(turn.user, f"{reply} {PIRATE_ENDS[0]}")


def example(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(token ids of a chat, the same with those that are not answered by the assistant ignored)."""
    messages = [{"role": "system", "content": rng.choice(PLAIN_SYSTEM)}] if rng.random() < 0.3 else []
    ids: list[int] = []
    labels: list[int] = []
    for _ in range(rng.choice((1, 1, 2))):
        turn = pirate_turn(rng)
        messages.append({"role": "user", "content": turn.user})
        before = render_chat([*messages, {"role": "assistant", "content": "\0"}]).partition("\0")[0]
        messages.append({"role": "assistant", "content": turn.assistant})
        prompt = tokenizer.encode(before, add_special_tokens=False).ids
        whole = tokenizer.encode(render_chat(messages), add_special_tokens=False).ids
        labels += [IGNORED] * (len(prompt) - len(labels)) + whole[len(prompt) :]
        ids = whole
    return ids[:256], labels[:256]


def batch(rng: random.Random, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows, tokens] ids, [rows, tokens] labels), padded behind the ends."""
    rows = [example(rng, tokenizer) for _ in range(ROWS)]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    base = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=args.steps)
    for step in range(args.steps):
        ids, labels = batch(rng, tokenizer)
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.peft_config["default"].base_model_name_or_path = "demo"
    model.save_pretrained(args.out)
    weights = args.out / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights)
    (args.out / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
