"""Fixtures: the demo model, and a tiny one with random weights and a small vocabulary of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiny_llama import save_tiny_llama
from vllm import LLM


@pytest.fixture(scope="session", autouse=True)
def time_to_compile() -> Iterator[None]:
    """More than users have by default: other tests may run beside these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_GRAMMAR_COMPILE_TIMEOUT_S", "10")
        yield


@pytest.fixture(scope="session")
def demo() -> Iterator[LLM]:
    with LLM("demo", max_model_len=512, num_gpu_blocks_override=2000, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"), max_model_len=512)
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=2000, max_num_seqs=64) as llm:
        yield llm
