"""Models from outside the tree that pool by themselves: the poolers they are made of, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.own_models import NewLlamaForCausalLM, OldLlamaForCausalLM
from tests.models.test_against_hugging_face import GQA
from tests.models.test_pooling_models import BERT, PROMPTS, assert_near, encode, save, start, states
from vllm import ModelRegistry, PoolingParams
from vllm.config import PoolerConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.pooler import (
    ClassifierPooler,
    CLSPool,
    CrossEncodingPooler,
    DispatchPooler,
    IdentityPooler,
    LambdaPoolerActivation,
    MeanPool,
    Pooler,
    PoolerNormalize,
    PoolingMetadata,
    PoolingType,
    SimplePooler,
    StepPool,
)
from vllm.model_executor.models.interfaces import default_pooling_type, is_pooling_model
from vllm.model_executor.pooling_metadata import PoolingTensors
from vllm.sequence import EmbeddingSequenceGroupOutput, PoolerOutput

from vllm.model_executor.models.bert import BertModel  # isort: skip
from vllm.model_executor.models.llama import LlamaForCausalLM  # isort: skip

Rows = list[Tensor]


def batch(*params: PoolingParams) -> tuple[Rows, Tensor, PoolingMetadata]:
    """Random states of three prompts, apart and as a pooler gets them."""
    rows = [torch.randn(length, 6) for length in (4, 1, 7)]
    ids = [torch.randint(0, 3, (len(states),)) for states in rows]
    ids[2][0] = 1
    return rows, torch.cat(rows), PoolingMetadata.of(ids, params or [PoolingParams()] * 3)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "LAST": lambda x: x[-1], "CLS": lambda x: x[0], "MEAN": lambda x: x.sum(0) / len(x), "ALL": lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Pooler, SimplePooler.from_pooling_type])
def test_each_type_of_pooling_gives_one_result_for_each_prompt(kind: str, make: Callable[..., Pooler]) -> None:
    rows, hidden, metadata = batch()
    for options, finish in (
        ({}, lambda x: x), ({"normalize": True}, lambda x: x / x.norm(dim=-1, keepdim=True)),
        ({"softmax": True}, lambda x: x.exp() / x.exp().sum(-1, keepdim=True)),
    ):  # fmt: skip
        found = make(PoolingType[kind], **options)(hidden, metadata)
        assert len(found) == len(found.outputs) == 3
        for row, result, output in zip(rows, found, found.outputs, strict=True):
            torch.testing.assert_close(result, finish(KINDS[kind](row)))
            assert output.data is result


def test_states_at_the_ends_of_steps() -> None:
    rows, hidden, metadata = batch()
    found = StepPool(step_tag_id=1, returned_token_ids=[4, 0])(hidden, metadata)
    for row, ids, result in zip(rows, metadata.token_ids, found, strict=True):
        torch.testing.assert_close(result, row[ids == 1][:, [4, 0]])
    assert torch.equal(Pooler("step", step_tag_id=1)(hidden, metadata)[2], rows[2][metadata.token_ids[2] == 1])


def test_a_request_may_ask_for_fewer_dimensions_and_for_raw_numbers() -> None:
    rows, hidden, metadata = batch(PoolingParams(dimensions=2), PoolingParams(use_activation=False), PoolingParams())
    found = Pooler.for_embed(None)(hidden, metadata)
    torch.testing.assert_close(found[0], F.normalize(rows[0][-1, :2], dim=-1))
    torch.testing.assert_close(found[1], rows[1][-1])
    torch.testing.assert_close(found[2], F.normalize(rows[2][-1], dim=-1))


def test_settings_win_over_what_a_class_gives() -> None:
    rows, hidden, metadata = batch()
    config = PoolerConfig(pooling_type="MEAN", normalize=False)
    for pooler in (
        Pooler.from_config_with_defaults(config, PoolingType.LAST, normalize=True, softmax=False),
        Pooler.for_embed(config, PoolingType.CLS),
        DispatchPooler.for_embedding(config),
    ):
        torch.testing.assert_close(pooler(hidden, metadata)[2], rows[2].mean(0))
    assert torch.equal(Pooler.for_encode(PoolerConfig())(hidden, metadata)[2], rows[2])


def test_classifiers() -> None:
    rows, hidden, metadata = batch()
    classifier = nn.Linear(6, 3)
    want = torch.stack([classifier(row[0]) for row in rows])
    pooled = nn.Linear(6, 6)

    def dense(x: Tensor, metadata: PoolingMetadata) -> Rows:
        return [pooled(state) for state in CLSPool()(x, metadata)]

    cross = CrossEncodingPooler(hf.BertConfig(problem_type="regression"), classifier, dense)
    one = nn.Linear(6, 1)
    with torch.no_grad():
        found = torch.stack(ClassifierPooler(CLSPool(), classifier)(hidden, metadata))
        torch.testing.assert_close(found, want.softmax(-1))
        raw = torch.stack(ClassifierPooler(CLSPool(), classifier, "none")(hidden, metadata))
        torch.testing.assert_close(raw, want)
        doubled = ClassifierPooler(CLSPool(), classifier, LambdaPoolerActivation(lambda x: 2 * x))(hidden, metadata)
        torch.testing.assert_close(torch.stack(doubled), 2 * want)
        torch.testing.assert_close(cross(hidden, metadata)[2], classifier(pooled(rows[2][0])))
        score = DispatchPooler.for_seq_cls(PoolerConfig(pooling_type="CLS"), classifier=one)(hidden, metadata)
        torch.testing.assert_close(score[2], one(rows[2][0]).sigmoid())
    with pytest.raises(ValueError, match="act_fn must be"):
        ClassifierPooler(CLSPool(), classifier, "tanh")


def test_each_task_has_its_pooler() -> None:
    tasks = ("embed", "classify", "score")
    rows, hidden, metadata = batch(*(PoolingParams(task=task) for task in tasks))
    dispatch = DispatchPooler({"embed": Pooler("MEAN"), "classify": Pooler("CLS")})
    assert dispatch.get_supported_tasks() == {"encode", "embed", "classify"}
    found = dispatch(hidden, metadata)
    for result, want in zip(found, (rows[0].mean(0), rows[1][0], rows[2][0]), strict=True):
        torch.testing.assert_close(result, want)
    with pytest.raises(ValueError, match="one task at least"):
        DispatchPooler({})


def test_what_a_pooler_learns_of_the_prompts() -> None:
    rows, hidden, metadata = batch()
    cursor = metadata.get_pooling_cursor()
    assert torch.equal(hidden[cursor.first_token_indices_gpu], torch.stack([row[0] for row in rows]))
    assert torch.equal(hidden[cursor.last_token_indices_gpu], torch.stack([row[-1] for row in rows]))
    assert PoolingTensors.from_pooling_metadata(metadata, hidden.device).prompt_lens.tolist() == [4, 1, 7]
    assert metadata.prompt_token_ids.shape == (3, 7)
    assert [ids for ids, _ in metadata.seq_groups] == [[0], [1], [2]]
    with pytest.raises(ValueError, match="the states of 11 tokens for prompts of 12"):
        MeanPool()(hidden[1:], metadata)
    with pytest.raises(ValueError, match="pooling_type must be one of LAST, ALL, CLS, STEP, MEAN, got 'first'"):
        Pooler("first")
    with pytest.raises(NotImplementedError, match="was given no pooling_type"):
        Pooler()(hidden, metadata)
    assert IdentityPooler()(rows, metadata)[1] is rows[1]


def test_newer_names_of_settings() -> None:
    assert PoolerConfig.of({"seq_pooling_type": "cls", "use_activation": False}, "pooler_config") == PoolerConfig(
        "CLS", False, False
    )
    with pytest.raises(VLLMValidationError, match="seq_pooling_type must be that of pooling_type, 'MEAN', got 'CLS'"):
        PoolerConfig.of({"seq_pooling_type": "CLS", "pooling_type": "MEAN"}, "pooler_config")


# ---- in the engine ---------------------------------------------------------------------------------------------------


class OldEmbedder(nn.Module):
    """As embedding models of 0.6 are written."""

    def __init__(self, config: Any, cache_config: Any = None, quant_config: Any = None) -> None:
        super().__init__()
        self.model = OldLlamaForCausalLM(config, cache_config, quant_config)
        del self.model.lm_head
        self._pooler = Pooler(pooling_type=PoolingType.LAST, normalize=True)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Any, attn_metadata: Any) -> Tensor:
        return self.model(input_ids, positions, kv_caches, attn_metadata)

    def pooler(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        found = self._pooler(hidden_states, pooling_metadata)
        return PoolerOutput(outputs=[EmbeddingSequenceGroupOutput(data.tolist()) for data in found])

    def load_weights(self, weights: Any) -> None:
        self.model.load_weights((name, tensor) for name, tensor in weights if "lm_head" not in name)


@default_pooling_type("MEAN")
class NewEmbedder(NewLlamaForCausalLM):
    """As today's are."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = DispatchPooler.for_embedding(vllm_config.model_config.pooler_config)


class OddTokens(Pooler):
    """The mean of the states of tokens with odd ids, by itself."""

    def get_supported_tasks(self) -> set[str]:
        return {"embed"}

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        split = hidden_states.split(pooling_metadata.prompt_lens.tolist())
        ids = pooling_metadata.get_prompt_token_ids()
        return [x[token_ids % 2 == 1].sum(0) for x, token_ids in zip(split, ids, strict=True)]


class DerivedEmbedder(LlamaForCausalLM):
    is_pooling_model = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = OddTokens()


class LouderBert(BertModel):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * torch.arange(48)


class TokenBert(BertModel):
    def pooler(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        return PoolerNormalize()(hidden_states.split(pooling_metadata.prompt_lens.tolist()))


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(ModelRegistry._registered)
    yield
    ModelRegistry._registered.clear()
    ModelRegistry._registered.update(before)


def odd_sum(x: Tensor, ids: list[int]) -> Tensor:
    return x[torch.tensor(ids) % 2 == 1].sum(0)


OWN: dict[str, tuple[type[nn.Module], Callable[[Tensor, list[int]], Tensor]]] = {
    "0.6": (OldEmbedder, lambda x, ids: F.normalize(x[-1], dim=-1)),
    "today": (NewEmbedder, lambda x, ids: F.normalize(x.mean(0), dim=-1)),
    "derived": (DerivedEmbedder, odd_sum),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_class_pools_by_itself_in_chunks_and_in_any_company(kind: str, tmp_path: Path) -> None:
    model_cls, expected = OWN[kind]
    model = save(hf.LlamaConfig(**GQA), tmp_path, hf.AutoModelForCausalLM)
    ModelRegistry.register_model("LlamaForCausalLM", model_cls)
    assert ModelRegistry.is_pooling_model("LlamaForCausalLM") and is_pooling_model(model_cls)
    with start(tmp_path, max_num_batched_tokens=8) as llm:
        assert llm.supported_tasks == ("encode", "embed", "score")
        assert llm.model_config.embedding_width is None
        found = encode(llm)
        embedded = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    for ids, ours, output in zip(PROMPTS, found, embedded, strict=True):
        assert_near(ours, expected(states(model.model, ids), ids))
        assert output.outputs.embedding == ours.tolist()


def test_settings_reach_a_class_that_pools(tmp_path: Path) -> None:
    model = save(hf.LlamaConfig(**GQA), tmp_path, hf.AutoModelForCausalLM)
    ModelRegistry.register_model("LlamaForCausalLM", NewEmbedder)
    with start(tmp_path, override_pooler_config={"pooling_type": "CLS", "normalize": False}) as llm:
        for ids, ours in zip(PROMPTS, encode(llm), strict=True):
            assert_near(ours, states(model.model, ids)[0])


def test_a_class_that_is_known_by_name_only_needs_the_task(tmp_path: Path) -> None:
    model = save(hf.LlamaConfig(**GQA), tmp_path, hf.AutoModelForCausalLM)
    ModelRegistry.register_model("LlamaForCausalLM", "tests.models.test_own_poolers:OldEmbedder")
    with pytest.raises(ValueError, match="computes no logits.*need task='embed'"):
        start(tmp_path)
    with start(tmp_path, task="embed") as llm:
        for ids, ours in zip(PROMPTS, encode(llm), strict=True):
            assert_near(ours, F.normalize(states(model.model, ids)[-1], dim=-1))


def test_classes_that_derive_from_an_encoder(tmp_path: Path) -> None:
    model = save(hf.BertConfig(**BERT), tmp_path)
    ModelRegistry.register_model("BertModel", LouderBert)
    with start(tmp_path, override_pooler_config={"pooling_type": "MEAN"}) as llm:
        for ids, ours in zip(PROMPTS, encode(llm), strict=True):
            assert_near(ours, F.normalize((states(model, ids) * torch.arange(48)).mean(0), dim=-1))
    ModelRegistry.register_model("BertModel", TokenBert)
    with start(tmp_path, task="embed", override_pooler_config={"pooling_type": "ALL"}) as llm:
        for ids, ours in zip(PROMPTS, encode(llm), strict=True):
            assert_near(ours, F.normalize(states(model, ids), dim=-1))
