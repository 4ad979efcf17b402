"""Throughput of embedding: a BERT of a given shape with random weights, beside transformers, in turns.

    python -m benchmarks.embeddings --texts 64 --turns 3                 # CPU, fp32
    python -m benchmarks.embeddings --texts 8192 --turns 3 --dtype float16   # GPU

Both sides get the same token ids and give normalised means, and both are warm. transformers runs as
sentence-transformers runs it: texts sorted by length, in padded batches, with scaled-dot-product attention; the best of
several batch sizes counts. With --peer sentence-transformers the package itself is run, and both sides get texts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
VOCABULARY = 30522
FIRST_WORD = 10


def save_model(folder: Path, shape: str) -> Any:
    """A random BERT with a tokenizer of words w10, w11, ... and sentence-transformers' files."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(**SHAPES[shape]), add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocab |= {f"[unused{i}]": i for i in range(4, FIRST_WORD)} | {f"w{i}": i for i in range(FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


def make_texts(count: int, mean: int, seed: int) -> list[list[int]]:
    """Token ids of texts whose lengths are log-normal around `mean`, from 4 to 512."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean), 0.6, count), 4, 512).astype(int)
    return [[2, *rng.integers(FIRST_WORD, VOCABULARY, n - 2).tolist(), 3] for n in lengths]


def with_transformers(model: Any, texts: list[list[int]], batch_size: int, device: str) -> np.ndarray:
    """Normalised means, in sorted and padded batches."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    found: np.ndarray = np.empty((len(texts), model.config.hidden_size), np.float32)
    kept = []
    with torch.inference_mode():
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            longest = len(texts[rows[0]])
            ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
            for i, row in enumerate(rows):
                ids[i, : len(texts[row])] = torch.tensor(texts[row])
                mask[i, : len(texts[row])] = 1
            ids, mask = ids.to(device), mask.to(device)
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            means = (states * mask[..., None].to(states.dtype)).sum(1) / mask.sum(1, keepdim=True).to(states.dtype)
            kept.append((rows, torch.nn.functional.normalize(means.float(), dim=-1)))
        for rows, means in kept:
            found[rows] = means.cpu().numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="bert-base")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--mean-length", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-sizes", type=int, nargs="*", help="Of the peer. Default: 32, and on a GPU more.")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--peer", choices=("transformers", "sentence-transformers"), default="transformers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from vllm import LLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = args.batch_sizes or ([32, 128, 512] if device == "cuda" else [8, 32])
    ids = make_texts(args.texts, args.mean_length, 0)
    tokens = sum(map(len, ids))
    with tempfile.TemporaryDirectory() as name:
        model = save_model(Path(name), args.shape).to(device, getattr(torch, args.dtype))
        llm = LLM(name, dtype=args.dtype, max_num_batched_tokens=args.max_num_batched_tokens, device=device)
        prompts: list[Any] = [{"prompt_token_ids": text} for text in ids]
        sides: dict[str, Callable[[], np.ndarray]] = {}
        if args.peer == "sentence-transformers":
            from sentence_transformers import SentenceTransformer

            prompts = [" ".join(f"w{i}" for i in text[1:-1]) for text in ids]
            other = SentenceTransformer(name, device=device, model_kwargs={"dtype": getattr(torch, args.dtype)})
            for size in sizes:
                sides[f"peer {size}"] = lambda size=size: other.encode(prompts, batch_size=size)  # type: ignore[misc]
        else:
            for size in sizes:
                sides[f"peer {size}"] = lambda size=size: with_transformers(model, ids, size, device)  # type: ignore[misc]
        sides["ours"] = lambda: np.array([o.outputs.array for o in llm.encode(prompts, use_tqdm=False)])
        results = {side: run() for side, run in sides.items()}  # warm, and compared
        near = min((results["ours"] * found).sum(-1).min() for found in results.values())
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(args.turns):
            for side, run in sides.items():
                started = time.perf_counter()
                run()
                best[side] = min(best[side], time.perf_counter() - started)
        llm.llm_engine.shutdown()
    peer = min(seconds for side, seconds in best.items() if side != "ours")
    report = {
        "shape": args.shape, "device": device, "dtype": args.dtype, "texts": args.texts, "tokens": tokens,
        "threads": torch.get_num_threads(), "seconds": {side: round(s, 4) for side, s in best.items()},
        "tokens_per_second": round(tokens / best["ours"]), "faster": round(peer / best["ours"], 3),
        "worst_cosine": round(float(near), 6), "peer": args.peer,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
