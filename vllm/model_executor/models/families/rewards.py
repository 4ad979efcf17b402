"""Reward models: InternLM2 and Qwen2.5-Math with heads that score every token, or the end of every step."""

from __future__ import annotations

from vllm.config.facts import Pooling
from vllm.config.hf import HFConfig
from vllm.model_executor.models.families.llama import QWEN2
from vllm.model_executor.models.families.remote import INTERNLM2
from vllm.model_executor.models.pooling import with_head
from vllm.model_executor.models.spec import Dense, PoolHead

REWARDS = Pooling("reward", "ALL", softmax=False)
STEPS = Pooling("reward", "STEP", softmax=True, step_tag=151651)  # <extra_0>, which ends a step
_TWO_LAYERS = {"score.0.{p}": "pool.0.{p}", "score.2.{p}": "pool.1.{p}"}


def _one_number(hf: HFConfig) -> PoolHead:
    return PoolHead((Dense(1, bias=False),))


def _two_layers(outputs: int, hf: HFConfig) -> PoolHead:
    return PoolHead((Dense(hf.hidden_size, act="relu"), Dense(outputs)))


INTERNLM2_REWARD = with_head(INTERNLM2, _one_number, {"v_head.{p}": "pool.0.{p}"}, REWARDS)
QWEN2_REWARD = with_head(QWEN2, lambda hf: _two_layers(1, hf), _TWO_LAYERS, REWARDS)
QWEN2_PROCESS_REWARD = with_head(QWEN2, lambda hf: _two_layers(2, hf), _TWO_LAYERS, STEPS)
