"""Llama as a user would write it outside the tree, once for each age of "Adding a New Model"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention import Attention, AttentionMetadata
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.sampler import Sampler, SamplerOutput
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import AutoWeightsLoader, make_layers, maybe_prefix
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.sequence import IntermediateTensors

STACKED = [
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
]


class OldBlock(nn.Module):
    def __init__(self, config: Any, cache_config: Any, quant_config: Any) -> None:
        super().__init__()
        world = get_tensor_model_parallel_world_size()
        self.heads = config.num_attention_heads // world
        self.kv_heads = max(1, config.num_key_value_heads // world)
        dim = config.head_dim
        self.split = [self.heads * dim, self.kv_heads * dim, self.kv_heads * dim]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
        )
        self.o_proj = RowParallelLinear(config.num_attention_heads * dim, config.hidden_size, bias=False)
        self.rotary_emb = get_rope(
            dim,
            rotary_dim=dim,
            max_position=config.max_position_embeddings,
            base=getattr(config, "rope_theta", 10000),
            rope_scaling=getattr(config, "rope_scaling", None),
        )
        self.attn = Attention(
            self.heads, dim, dim**-0.5, num_kv_heads=self.kv_heads, cache_config=cache_config, quant_config=quant_config
        )
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [config.intermediate_size] * 2, bias=False)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = SiluAndMul()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        kv_cache: Tensor,
        attn_metadata: AttentionMetadata,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split(self.split, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        hidden, _ = self.o_proj(self.attn(q, k, v, kv_cache, attn_metadata))
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        gate_up, _ = self.gate_up_proj(hidden)
        hidden, _ = self.down_proj(self.act(gate_up))
        return hidden, residual


class OldLlamaForCausalLM(nn.Module):
    """The 0.6 signature."""

    def __init__(
        self, config: Any, cache_config: Any = None, quant_config: Any = None, lora_config: Any = None
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            OldBlock(config, cache_config, quant_config) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.sampler = Sampler()

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], attn_metadata: AttentionMetadata
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        residual = None
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(positions, hidden, cache, attn_metadata, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden

    def compute_logits(self, hidden_states: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states, sampling_metadata)

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        return self.sampler(logits, sampling_metadata)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            name = name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
            for fused, part, shard_id in STACKED:
                if part in name:
                    parameter = parameters[name.replace(part, fused)]
                    parameter.weight_loader(parameter, tensor, shard_id)
                    break
            else:
                parameter = parameters[name]
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                loader(parameter, tensor)


class NewMLP(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(
            config.hidden_size, config.intermediate_size, bias=False, prefix=f"{prefix}.gate_proj"
        )
        self.up_proj = ColumnParallelLinear(
            config.hidden_size, config.intermediate_size, bias=False, prefix=f"{prefix}.up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=False, prefix=f"{prefix}.down_proj"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)[0]) * self.up_proj(x)[0])[0]


class NewAttention(nn.Module):
    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = ColumnParallelLinear(config.hidden_size, heads * dim, bias=False)
        self.k_proj = ColumnParallelLinear(config.hidden_size, kv_heads * dim, bias=False)
        self.v_proj = ColumnParallelLinear(config.hidden_size, kv_heads * dim, bias=False)
        self.o_proj = RowParallelLinear(heads * dim, config.hidden_size, bias=False)
        self.rotary_emb = get_rope(dim, dim, config.max_position_embeddings)
        world = get_tensor_model_parallel_world_size()
        self.attn = Attention(
            heads // world,
            dim,
            scale=dim**-0.5,
            num_kv_heads=kv_heads // world,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x)[0], self.k_proj(x)[0], self.v_proj(x)[0]
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class NewBlock(nn.Module):
    def __init__(self, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = NewAttention(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = NewMLP(config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        x = x + self.self_attn(positions, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NewModel(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.start, self.end, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: NewBlock(vllm_config, prefix), prefix=f"{prefix}.layers"
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers[self.start : self.end]:
            x = layer(positions, x)
        return self.norm(x)


class NewLlamaForCausalLM(nn.Module):
    """The 0.8 signature."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = NewModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor, sampling_metadata: SamplingMetadata) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states, sampling_metadata)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)
