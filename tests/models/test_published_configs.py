"""config.json as published loads as it is: random weights under it give the logits of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.models.harness import PagedDriver, load, relative_error, save_random_hf_model
from tests.models.published_configs import OLDER, PUBLISHED
from tests.models.test_against_hugging_face import SDPA, logits_of

# what transformers' modules must not have: ids beyond the small vocabulary, a dtype for constants made while building
_NOT_FOR_ORACLES = ("auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")


def oracle(config: dict[str, Any], folder: Path) -> torch.nn.Module:
    """A random model of transformers' class, whose weights lie in the folder."""
    plain = {name: value for name, value in config.items() if name not in _NOT_FOR_ORACLES}
    made = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(plain)))
    made.pad_token_id = None
    theta = plain.get("attn_config", {}).get("rope_theta")
    if theta is not None:  # of DBRX, which transformers 5 reads and does not use
        made.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    return save_random_hf_model(made, folder, attention="sdpa" if config.get("alibi") and SDPA else "eager")


def check(reference: torch.nn.Module, config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    # a short prompt takes other factors in transformers, where a server must take the same for all
    lengths = (38, 30) if "long_factor" in (config.get("rope_scaling") or {}) else (38, 9)
    prompts = [torch.randint(3, 131, (length,)) for length in lengths]
    ours = PagedDriver(load(folder), requests=2).run(prompts, [5, 1, 7, 3])
    for prompt, found in zip(prompts, ours, strict=True):
        assert relative_error(found, logits_of(reference, prompt, "")) < 1e-5


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    check(oracle(PUBLISHED[name], tmp_path), PUBLISHED[name], tmp_path)


@pytest.mark.parametrize("name", OLDER)
def test_a_config_of_a_first_revision_means_the_same(name: str, tmp_path: Path) -> None:
    same, config = OLDER[name]
    check(oracle(PUBLISHED[same], tmp_path), config, tmp_path)
