"""Writes the page of supported models: `python -m tools.supported_models_page > docs/supported_models.md`."""

from __future__ import annotations

import inspect
from pathlib import Path

from vllm.config.hf_defaults import architecture_of, model_types
from vllm.model_executor.models.families.llama import NAMES
from vllm.model_executor.models.family import Family
from vllm.model_executor.models.registry import _CONVERTED, _FAMILIES, family_of
from vllm.model_executor.models.spec import Decoder

_HEAD = """# Supported models

This page is generated: `python -m tools.supported_models_page > docs/supported_models.md`.

Decoder-only text models, by the name in `architectures` of their
config.json. Names in the same line of the first column are the same family.

Every family is held in fp32 against an independent implementation, at every position of prompts that are computed in
chunks through the paged cache, for the variants of its config (tied heads, biases, windows, norms, scalings): against
transformers, or, where transformers has no such model, against a plain one written from the published description
(`tests/models/references.py`). The last column says how long a family is: lines of the function that turns its config
into a spec, and names beyond those of Llama's checkpoints. All that runs them, `vllm/model_executor/models`, has about
{total} lines, of which the families are {families}; there are {count} families.

Through the whole engine, each family and variant gives the tokens of that implementation in a mixed batch, with prompts
that are cut and requests that must make way, and two ranks its logits (`tests/models/test_every_family.py`; a tenth of
them in each run of the tests, all with `make test-models-full`). No field that a family sets is decoration: without any
one of them the comparison fails. With adapters on every linear layer each gives what changed weights would (LoRA), its
pipeline stages give what the whole model gives (PP), and its weights can be quantized while they are loaded
(quantization, with fp8): `tests/models/test_every_family_adapted.py`.

| architecture | public checkpoints | held against | windows | LoRA | PP | quantization | lines of its own |
|---|---|---|---|---|---|---|---|
"""
_POOLING = """
## Models that pool

They embed, classify, score or reward ([pooling.md](pooling.md)). The last column says what they pool if neither
sentence-transformers' files nor `override_pooler_config` say otherwise. Hidden states at every position, and what heads
make of them, are held in fp32 against transformers (heads of reward models: against their description).

Any decoder of the table above is known by two more names: `...Model` instead of `...ForCausalLM` (or `...LMHeadModel`)
embeds by its last token, `...ForSequenceClassification` classifies by it. With `task` any of them becomes an embedder
or a reward model.

| architecture | public checkpoints | made for | pools |
|---|---|---|---|
"""
_NOTES = """
Python code of a repository (`auto_map` in config.json) is neither needed for the models above nor run; some of their
tokenizers need it, and with it `--trust-remote-code`. Files of public repositories are held against what transformers
makes of them, field by field as published, in `tests/models/test_published_configs.py`. Checkpoints may be quantized
([engine_arguments.md](engine_arguments.md), `quantization`).

**Any other decoder of transformers** runs generically: its own modules, with this engine's paged attention, chunked
prefill, prefix caching and preemption. The log says so; it is correct, but slower, and there are no CUDA graphs.
`--model-impl transformers` runs a listed model so, too; `--model-impl vllm` refuses what is not listed. Linear layers
may be quantized while they are loaded (`--quantization fp8`, `bitsandbytes`), and are shared by ranks as the model's
`base_model_tp_plan` says. Before it is used, a model runs a few tokens; one that this engine would get wrong is
refused, with the reason: tokens that meet outside of attention (recurrent states, convolutions), masks other than
causal ones and windows, attention with arguments of its own (sinks, biases by position) or to keys that are no token's,
layers that attend twice, positions that do not count from 0 (RoBERTa), code without transformers' `AttentionInterface`,
and scalings of positions that depend on the batch. LoRA is not supported with them.
A repository's own code (`auto_map`) runs with `--trust-remote-code` only. Held in fp32 against transformers in
`tests/models/test_transformers_decoder.py`: Arcee, Helium, Apertus, VaultGemma, ModernBERT decoders, CTRL, MiniMax M2,
NanoChat, Jais 2, Solar Open, AFMoE, and listed families once more. Whatever is neither listed nor in
transformers is an error that lists the near names; [adding_a_model.md](adding_a_model.md) says how to run it.

Beyond the length of training: Qwen 1 rotates a prompt by its own length and scales queries, as its code does (steps
with such a prompt are not captured on a GPU). `chatglm2-6b-32k` divides positions; its config, which reads as if the
base grew, is known by `_name_or_path`. A Jais or BTLM with `train_seq_len` divides distances by how far a token is
beyond it, which is what its code computes token by token.

Not supported, with an error that says so: models that mix Mamba 2 with attention, ChatGLM 1, and models that see or
hear.
"""


_EVERY_FAMILY = ("yes", "yes", "yes")  # LoRA, PP, quantization: what the tests ask of each family


def markdown() -> str:
    """The page."""
    known = {architecture_of(model_type) for model_type in model_types()}
    families: dict[tuple[str, str], list[str]] = {}
    pooling = {name: entry[2] for name, entry in _FAMILIES.items()}
    for _, examples in _CONVERTED.values():
        pooling |= examples
    for architecture, (module, name, _) in _FAMILIES.items():
        families.setdefault((module, name), []).append(architecture)
    rows = []
    for names in families.values():
        family = family_of(names[0])
        if family is not None and family.pool is not None:
            continue
        checkpoints = ", ".join(dict.fromkeys(_FAMILIES[name][2] for name in names))
        source = "transformers" if known & set(names) else "its description"
        windows = "" if family is None or family.facts.windows.value == "none" else "if its config has them"
        size = "" if family is None else _size(family)
        shown = ", ".join(f"`{name}`" for name in names)
        rows.append((shown, checkpoints, source, windows, *_EVERY_FAMILY, size))
    lines = [f"| {' | '.join(row)} |" for row in sorted(rows, key=lambda row: row[0].lower())]
    pooled = [_pooling_row(name, checkpoints) for name, checkpoints in sorted(pooling.items(), key=_lower)]
    return _head(len(rows)) + "\n".join(lines) + "\n" + _POOLING + "\n".join(filter(None, pooled)) + "\n" + _NOTES


def _head(count: int) -> str:
    """The text above the table, with lines in thousands, so that not every change is one of this page."""
    folder = Path(inspect.getfile(Decoder)).parent
    sizes = [
        round(sum(len(file.read_text().splitlines()) for file in place.rglob("*.py")), -3)
        for place in (folder, folder / "families")
    ]
    return _HEAD.format(total=sizes[0], families=sizes[1], count=count)


def _size(family: Family) -> str:
    """Lines of the function that reads its config, and names beyond those of Llama's checkpoints."""
    names = [rename for rename in family.names if rename not in NAMES]
    return f"{len(inspect.getsource(family.decoder).splitlines())} + {len(names)} names"


def _lower(item: tuple[str, str]) -> str:
    return item[0].lower()


def _pooling_row(architecture: str, checkpoints: str) -> str:
    """A line of the second table; nothing for an architecture that generates."""
    family = family_of(architecture)
    if family is None or family.facts.pooling is None:
        return ""
    pooling = family.facts.pooling
    how = f"{pooling.type}, normalised" if pooling.normalize else pooling.type
    return f"| `{architecture}` | {checkpoints} | {pooling.task} | {how} |"


if __name__ == "__main__":
    print(markdown(), end="")
