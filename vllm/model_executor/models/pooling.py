"""Families that generate, made into families that pool: as embedders, classifiers and reward models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllm.config.facts import Facts, Pooling
from vllm.config.hf import HFConfig
from vllm.model_executor.models.family import Family, renames
from vllm.model_executor.models.spec import Block, BlockSpec, Decoder, Dense, PoolHead

EMBED = Pooling("embed", "LAST", normalize=True)
CLASSIFY = Pooling("classify", "LAST")
REWARD = Pooling("reward", "ALL")


def converted(family: Family, convert: str) -> Family:
    """The family with its head replaced: convert is "embed", "classify", "reward", or "none" for the family itself."""
    if convert == "none" or family.pool is not None:
        return family
    return {"embed": as_embedder, "classify": as_classifier, "reward": as_reward_model}[convert](family)


def as_embedder(family: Family) -> Family:
    """The hidden state of the last token, normalised. A config may say that no token is hidden from another."""
    return with_head(family, lambda hf: PoolHead(), {}, EMBED)


def as_reward_model(family: Family) -> Family:
    """Every token's hidden state, or, where tokens were chosen (`HFConfig.head_tokens`), its logits of these."""

    def head(hf: HFConfig) -> PoolHead:
        rows = hf.head_tokens
        return PoolHead((Dense(len(rows), bias=False),), rows) if rows else PoolHead()

    return with_head(family, head, {}, REWARD)


def as_classifier(family: Family) -> Family:
    """A score of the last token for each class; or its logits of the tokens that the config names, as a reranker has
    them (`classifier_from_token`), of which two may be meant to be compared.
    """
    return with_head(family, _class_head, {"score.{p}": "pool.0.{p}"}, CLASSIFY)


def _class_head(hf: HFConfig) -> PoolHead:
    rows = hf.head_tokens
    if not rows:
        return PoolHead((Dense(hf.num_labels, bias=False),))
    compared = hf.get_bool("is_original_qwen3_reranker", default=False) or (
        hf.get_str("method", default="no_post_processing") == "from_2_way_softmax"
    )
    if compared and len(rows) != 2:
        raise ValueError(f"{hf.file}: two tokens are compared, but classifier_from_token has {len(rows)}.")
    return PoolHead((Dense(1 if compared else len(rows), bias=False),), rows, compared)


def with_head(family: Family, head: Callable[[HFConfig], PoolHead], names: dict[str, str], pooling: Pooling) -> Family:
    """The family with a head of its own kind, whose weights have these names. The language model's head, if a
    checkpoint has one, is left out.
    """

    def decoder(hf: HFConfig) -> Decoder:
        made = family.decoder_of(hf)
        return seeing_all(made, hf) if hf.sees_whole_prompt and not family.facts.encoder else made

    unused = tuple(rename.source for rename in family.names if rename.target.startswith("head."))
    return replace(
        family,
        decoder=decoder,
        names=renames(names) + family.names,
        harmless=family.harmless + unused,
        facts=replace(family.facts, pooling=pooling),
        pool=head,
    )


def seeing_all(decoder: Decoder, hf: HFConfig) -> Decoder:
    """The same model without the causal mask. Raises ValueError if a layer is more than attention and an MLP."""

    def whole(block: BlockSpec) -> BlockSpec:
        if not isinstance(block, Block):
            raise ValueError(f"{hf.file}: layers of type {type(block).__name__} cannot see later tokens.")
        window = block.attn.window
        if window is not None:  # of which half is on either side
            window = window // 2 + 1
        return replace(block, attn=replace(block.attn, causal=False, window=window))

    return replace(decoder, blocks=tuple(map(whole, decoder.blocks)))


def classifier_facts(facts: Facts, type: str) -> Facts:
    """Facts of an encoder with a head for classes, pooled as `type` says."""
    return replace(facts, pooling=Pooling("classify", type))
