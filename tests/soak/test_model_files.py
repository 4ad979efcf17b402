"""T35: damaged and hostile files of a model: it runs, or the error says what is wrong; nothing in them is executed."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm import LLM, SamplingParams

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "generation_config.json")
HEAD = 3000  # bytes of a file that are damaged: the header of the weights, the beginning of the others


def strange_values(bait: Path) -> tuple[Any, ...]:
    code = f"__import__('pathlib').Path({str(bait)!r}).touch()"
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    numbers = (-1, 0, 1, 2**31, 2**63, 10**40, 1e308, -0.5)
    return (None, True, *numbers, "", "x", "\0", "../../etc/passwd", code, template, [], [1], [[]], {}, {"a": 1})


def changed(value: Any, rng: random.Random, strange: tuple[Any, ...]) -> Any:
    """The JSON value with one value in it replaced, or one key of an object left out."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if rng.random() < 0.15 else rest | {key: changed(value[key], rng, strange)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng, strange), *value[at + 1 :]]
    return rng.choice(strange)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to four bytes changed, some bytes cut out or put in."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(found), HEAD) or 1)
        kind = rng.randrange(3)
        if kind == 0:
            found[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del found[at : at + rng.randint(1, 20)]
        else:
            found[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(found)


def test_t35_a_thousand_damaged_models(model_folder, tmp_path):
    bait = tmp_path / "bait"
    strange = strange_values(bait)
    ends: Counter[str] = Counter()
    wrong = []
    for i in range(1000):
        rng = random.Random(i)
        folder = tmp_path / "model"
        shutil.copytree(model_folder, folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "temperature": 0.5}))
        file = folder / rng.choice(FILES)
        if file.suffix == ".json" and rng.random() < 0.7:
            document = json.loads(file.read_text())
            for _ in range(rng.randint(1, 2)):
                document = changed(document, rng, strange)
            if rng.random() < 0.1 and isinstance(document, dict):
                document["auto_map"] = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]}
                (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(bait)!r}).touch()\n")
            file.write_text(json.dumps(document))
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        limits = {"max_model_len": 64, "num_gpu_blocks_override": 40, "block_size": 8, "max_num_seqs": 4}
        try:
            with LLM(str(folder), dtype="float32", **limits) as llm:
                llm.generate(["Hello"] * 2, SamplingParams(max_tokens=2), use_tqdm=False)
            ends["run"] += 1
        except (ValueError, OSError) as error:
            ends["refused"] += 1
            assert str(error)
        except Exception as error:
            wrong.append((i, file.name, f"{type(error).__name__}: {error}"[:200]))
        shutil.rmtree(folder)
    print(
        f"T35: 1,000 damaged models: {ends['run']} run, {ends['refused']} refused, {len(wrong)} otherwise; no code run"
    )
    assert not bait.exists()
    assert not wrong, wrong[:20]
