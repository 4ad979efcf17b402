"""A class for each built-in architecture, made of its family, for programs that derive from it.

    from vllm.model_executor.models.llama import LlamaForCausalLM

    class MyLlama(LlamaForCausalLM):
        def compute_logits(self, hidden_states, sampling_metadata=None): ...

    ModelRegistry.register_model("MyLlamaForCausalLM", MyLlama)

The methods are those that vLLM's models have, in the signatures of 0.6 and of today. The engine itself needs none of
these classes: it runs families.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from vllm.config.hf import HFConfig
from vllm.distributed import current_tensor_parallel, use_tensor_parallel
from vllm.model_executor.layers.sampler import Sampler
from vllm.model_executor.model_loader import loader
from vllm.model_executor.model_loader.filler import ProcessesWeights
from vllm.model_executor.model_loader.live_weights import unpacked
from vllm.model_executor.model_loader.rank_state import RankState
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.architecture_modules import PACKAGE, module_of
from vllm.model_executor.models.out_of_tree import logits_of, pool_with, states_of
from vllm.model_executor.models.registry import built_in_family
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.pooling_params import PoolingParams
from vllm.step.inputs import RowView, StepInputs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.weights import Weights
    from vllm.model_executor.models.blocks import SelfAttention

_BUILDING: ContextVar[tuple[VllmConfig, torch.device] | None] = ContextVar("building", default=None)


@contextmanager
def building(config: VllmConfig, device: torch.device) -> Iterator[None]:
    """Inside, models may be constructed from a config alone, as those of 0.6 are."""
    token = _BUILDING.set((config, device))
    try:
        yield
    finally:
        _BUILDING.reset(token)


class ArchitectureModel(nn.Module):
    """A model of a built-in family, under the methods that programs override and call.

    model: the modules; `model.embed` and `model.blocks` are its parts. It takes the arguments of `forward`.
    lm_head, logits_processor: what makes logits; not of a family that pools.   config: transformers' config object.

    Constructors: (config, cache_config=None, quant_config=None, ...) or (*, vllm_config, prefix=""). What a derived
    class changes in the config before it calls this one's is heeded.
    """

    architecture: ClassVar[str]

    def __init__(
        self,
        config: Any = None,
        cache_config: Any = None,
        quant_config: Any = None,
        lora_config: Any = None,
        *,
        vllm_config: VllmConfig | None = None,
        prefix: str = "",
        **unused: Any,
    ) -> None:
        super().__init__()
        now = _BUILDING.get()
        if now is None:
            raise RuntimeError(
                f"{type(self).__name__} is constructed by the engine: register it with ModelRegistry.register_model."
            )
        given, device = now
        vllm_config = given if vllm_config is None else vllm_config
        self.vllm_config = vllm_config
        self.config = vllm_config.model_config.hf_config if config is None else config
        trusted = vllm_config.model_config.trust_remote_code
        hf = _with_changes(vllm_config.model_config.hf, self.config, trusted)
        family = built_in_family(self.architecture)
        self._new = loader.new_decoder(vllm_config, family, device, current_tensor_parallel(), 0, hf)
        self._device = device
        self.model = self._new.model
        tp = current_tensor_parallel()
        self.model.open_weights = lambda: loader.live_weights(self._new, vllm_config, device, tp, 0, hf)
        if not self.model.pools:
            self.lm_head, self.logits_processor = self.model.head, self.model.logits_processor
        self.sampler = Sampler()
        self.filled_bytes, self.is_filled = 0, False
        self._bound: tuple[StepInputs, Sequence[Tensor]] | None = None
        self._embeds: Tensor | None = None
        self.model.register_forward_pre_hook(self._as_step, with_kwargs=True)
        self.model.register_forward_hook(lambda *_: setattr(self, "_embeds", None), always_call=True)
        if "embed" in self.model._modules:
            # (a copy: layers overwrite what they add to)
            self.model.embed.register_forward_hook(
                lambda _, __, out: out if self._embeds is None else self._embeds.clone()
            )

    @contextmanager
    def bound(self, step: StepInputs, kv_caches: Sequence[Tensor]) -> Iterator[None]:
        """Inside, `forward` works on this batch and cache."""
        self._bound = step, kv_caches
        try:
            yield
        finally:
            self._bound = None

    def forward(self, input_ids: Tensor | None, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states of all tokens, [tokens, hidden]. input_ids, positions: [tokens], those of the step or others.

        Further arguments: (kv_caches, attn_metadata, ...) or (intermediate_tensors, inputs_embeds), by place or name;
        of these only inputs_embeds, [tokens, hidden], which replaces what the embedding gives, changes anything.
        """
        found: Tensor = self.model(input_ids, positions, *args, **kwargs)
        return found

    def _as_step(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the modules take, of the arguments of `forward`."""
        if args and isinstance(args[0], StepInputs):
            return args, kwargs
        if self._bound is None:
            raise RuntimeError(f"{type(self).__name__} was called outside of a step of the engine.")
        given = {**dict(zip(("input_ids", "positions"), args, strict=False)), **kwargs}
        tensors = (value for value in args[2:] if isinstance(value, Tensor))
        self._embeds = given.get("inputs_embeds", next(tensors, None))
        step, kv_caches = self._bound
        ids = step.token_ids if given.get("input_ids") is None else given["input_ids"]
        step = msgspec.structs.replace(step, token_ids=ids, positions=given["positions"], logits_rows=None)
        return (step, kv_caches), {}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        out: Tensor = self.model.embed(input_ids)
        return out

    def get_input_embeddings(self, input_ids: Tensor | None = None) -> Any:
        """`embed_input_ids` under its older name; without tokens, the embedding itself."""
        return self.model.embed if input_ids is None else self.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: Tensor, sampling_metadata: SamplingMetadata | None = None) -> Tensor | None:
        """[rows, hidden] -> [rows, vocabulary] fp32."""
        return self.model.logits(hidden_states)

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Any:
        """As models of 0.6 have it; the engine samples by itself."""
        return self.sampler(logits, sampling_metadata)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """`load_checkpoint`, which a derived class also reaches through an AutoWeightsLoader of itself."""
        return self.load_checkpoint(weights)

    def load_checkpoint(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the model from a checkpoint's tensors, under the names that checkpoints of the architecture have, and
        what a derived class has added under its own; the names of all that was filled. Of a model that is loaded
        already: give those that are named new values (`DecoderModel.load_weights`).

        Raises ValueError for a tensor that the model lacks, and for one that is missing at first.
        """
        extra, loaded = dict(self.extra_parameters()), set[str]()

        def rest() -> Iterator[tuple[str, Tensor, Path]]:
            for name, tensor in weights:
                if name in extra:
                    getattr(extra[name], "weight_loader", default_weight_loader)(extra[name], tensor)
                    loaded.add(name)
                else:
                    yield name, tensor, Path(f"{self.architecture}.load_weights")

        if self.is_filled:
            taken = self.model.load_weights((name, tensor) for name, tensor, _ in rest())
            return taken | loaded
        self.filled_bytes = self._new.fill(rest(), self._device)
        return loaded | {name for name, _ in self.model.named_parameters(prefix="model")}

    def extra_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What a derived class has added to the family's parameters."""
        own = {id(parameter) for parameter in self.model.parameters()}
        return ((name, parameter) for name, parameter in self.named_parameters() if id(parameter) not in own)


@functools.cache
def class_of(architecture: str) -> type[ArchitectureModel]:
    """The class of a built-in architecture."""
    return type(
        architecture,
        (ArchitectureModel,),
        {
            "architecture": architecture,
            "__module__": f"{PACKAGE}.{module_of(architecture)}",
            "__doc__": f"{architecture}: see `ArchitectureModel`.",
        },
    )


def _with_changes(hf: HFConfig, config: Any, trust_remote_code: bool) -> HFConfig:
    """`hf` with what somebody changed in transformers' object of it."""
    before = hf.to_transformers(trust_remote_code=trust_remote_code).to_dict()
    changed = {name: value for name, value in config.to_dict().items() if before.get(name) != value}
    return HFConfig.from_dict({**hf.raw, **changed}, hf.path) if changed else hf


class DerivedModel(nn.Module):
    """A user's class that derives from one of these, as the engine knows models (`traits.Model`)."""

    def __init__(self, model: ArchitectureModel, forward_names: frozenset[str], logits_names: frozenset[str]) -> None:
        super().__init__()
        self.model, self._forward_names, self._logits_names = model, forward_names, logits_names
        self.cache_scales = model.model.cache_scales
        given = model.model.traits
        heads = (*given.heads, "pooler") if callable(getattr(model, "pooler", None)) else given.heads
        self.traits = replace(
            given, heads=heads, replayable=False, decoder=None, splits=False, handles=frozenset(), taps=()
        )

    def forward(self, step: StepInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        """Hidden states of the tokens in `step.logits_rows`, [rows, hidden]."""
        known = {"kv_caches": list(kv_caches), "attn_metadata": step, "intermediate_tensors": None}
        arguments = {name: value for name, value in known.items() if name in self._forward_names}
        with self.model.bound(step, kv_caches):
            hidden = self.model(step.token_ids, step.positions, **arguments)
        return step.wanted(states_of(self.model, hidden, len(step.positions)))

    def paged_attention(self) -> dict[int, SelfAttention]:
        """Those of the layers made from the family."""
        return self.model.model.paged_attention()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Let the class load new values for weights of the loaded model; the names of what it filled."""
        inner = set(self.model.model.modules())
        own = [module for module in self.model.modules() if module not in inner]
        with use_tensor_parallel(self.model.model.tp), torch.no_grad(), unpacked(own):
            return self.model.load_weights(weights)

    def logits(self, hidden: Tensor, view: RowView | None = None) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocabulary] fp32."""
        arguments = [SamplingMetadata()] if "sampling_metadata" in self._logits_names else []
        logits = self.model.compute_logits(hidden, *arguments)
        return logits_of(self.model, logits, len(hidden), self.traits.vocab_size)

    def pooled(self, states: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, outputs], both fp32: what the family's head makes of pooled states."""
        return self.model.model.pooled(states)

    def pool(self, hidden: Tensor, token_ids: Sequence[Tensor], params: Sequence[PoolingParams]) -> Sequence[Tensor]:
        """hidden: [tokens, hidden] of complete prompts one behind the other -> what the class makes of each."""
        return pool_with(self.model, hidden, token_ids, params)


def fill_derived(model: ArchitectureModel, weights: Weights, device: torch.device, seed: int) -> int:
    """Let the class load its weights; the bytes that the family's take. Raises ValueError if some are missing."""
    name = type(model).__name__
    if isinstance(weights, RankState):
        raise ValueError(f"{name} is a class of your own, whose weights cannot be loaded from a rank's state.")
    extra = dict(model.extra_parameters())
    if weights is None:
        for parameter in extra.values():
            if parameter.dim() > 1:
                parameter.data.uniform_(-0.035, 0.035)
        size = loader.fill_with_random_numbers(model.model, device, seed)
    else:
        for parameter in extra.values():
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        model.load_weights((key, tensor) for key, tensor, _ in weights)
        size = model.filled_bytes
        missing = [key for key, parameter in model.model.named_parameters() if parameter.is_meta]
        missing += [key for key, parameter in extra.items() if parameter.isnan().all() and parameter.numel()]
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {', '.join(missing[:8])}.")
    inner = set(model.model.modules())
    for module in model.modules():
        if module not in inner and isinstance(module, ProcessesWeights):
            module.process_after_load()
    model.is_filled = True
    return size
