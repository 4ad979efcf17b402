"""Models from outside the tree: the two signatures of "Adding a New Model" behind the engine's own interface.

0.6:  __init__(self, config, cache_config=None, quant_config=None, ...)
      forward(input_ids, positions, kv_caches, attn_metadata)
0.8:  __init__(self, *, vllm_config, prefix="")
      forward(input_ids, positions, intermediate_tensors=None, inputs_embeds=None)

Both have compute_logits(hidden_states, sampling_metadata) and load_weights(weights). Each method is called with those
of the known arguments that its signature names, so mixtures of the two work too. `sample` is not called: sampling is
the engine's, so that every request keeps its own parameters and seed.

A class that pools has `pooler(hidden_states, pooling_metadata)` in place of compute_logits, a method or a module
(`layers/pooler.py`).
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm.attention.layer import Attention
from vllm.config.hf import HFConfig
from vllm.config.pooler import PoolerConfig, read_sentence_files
from vllm.distributed import TensorParallel, use_tensor_parallel
from vllm.model_executor.layers.dtypes import dtype_of
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import rank_state
from vllm.model_executor.model_loader.filler import ProcessesWeights
from vllm.model_executor.models.interfaces_base import DEFAULT_POOLING_TYPE
from vllm.model_executor.models.kv_groups import group_layers, kv_places
from vllm.model_executor.models.traits import Traits
from vllm.model_executor.pooling_metadata import PoolingMetadata
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.pooling_params import PoolingParams
from vllm.sequence import PoolerOutput
from vllm.step.inputs import RowView, StepInputs
from vllm.step.kv_need import attention_need

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.weights import Weights
    from vllm.model_executor.models.architecture_classes import DerivedModel


class OutOfTreeModel(nn.Module):
    """A user's model as the engine knows models (`traits.Model`)."""

    def __init__(
        self, model: nn.Module, hf: HFConfig, dtype: torch.dtype, max_positions: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.cache_scales: dict[int, tuple[float, float]] = {}
        self.model, self.dtype, self.tp, self.max_positions = model, dtype, tp, max_positions
        self.layers = [module for module in model.modules() if isinstance(module, Attention)]
        name = type(model).__name__
        if not self.layers:
            raise ValueError(f"{name} has no vllm.attention.Attention layer, so the engine has no cache to give it.")
        heads = tuple(head for method, head in _HEADS.items() if callable(getattr(model, method, None)))
        for method in ("forward", "load_weights", *(() if heads else ("compute_logits",))):
            if not hasattr(model, method):
                raise ValueError(f'{name} has no method {method}(). See "Adding a New Model" in the guide.')
        windows = [self._window(layer, hf) for layer in self.layers]
        kv = tuple(
            attention_need(layer.num_kv_heads, layer.head_size, window)
            for layer, window in zip(self.layers, windows, strict=True)
        )
        self.traits = Traits(hf.hidden_size, dtype, hf.vocab_size, kv, range(len(kv)), heads)
        places = kv_places(group_layers(kv), kv)
        for index, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            layer.place, layer.params = places[index], replace(layer.params, window=window)
        self._forward_names = _parameter_names(model.forward)
        self._logits_names = _parameter_names(model.compute_logits) if "logits" in heads else frozenset()  # type: ignore[arg-type]

    def _window(self, layer: Attention, hf: HFConfig) -> int | None:
        """The layer's own window, else the config's if that covers every layer; None if no sequence can outgrow it."""
        window = layer.sliding_window
        if window is None and set(hf.layer_types) == {"sliding_attention"}:
            window = hf.sliding_window
        return window if window is not None and window < self.max_positions else None

    def forward(self, step: StepInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        """Hidden states of the tokens in `step.logits_rows`, [rows, hidden]."""
        places = [layer.place for layer in self.layers]
        known = {
            "kv_caches": [kv_caches[place.tensor] for place in places if place is not None],
            "attn_metadata": step,
            "intermediate_tensors": None,
            "inputs_embeds": None,
        }
        arguments = {name: value for name, value in known.items() if name in self._forward_names}
        with self._prepared(kv_caches, step):
            hidden = self.model(step.token_ids, step.positions, **arguments)
        return step.wanted(states_of(self.model, hidden, len(step.positions)))

    @contextmanager
    def _prepared(self, kv_caches: Sequence[Tensor], step: StepInputs) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(use_tensor_parallel(self.tp))
            for layer in self.layers:
                stack.enter_context(layer.bound(kv_caches, step))
            yield

    def paged_attention(self) -> dict[int, Attention]:
        """The attention layers, in order."""
        return dict(enumerate(self.layers))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Let the class load new values for weights of the loaded model; what its `load_weights` returns."""
        from vllm.model_executor.model_loader.live_weights import unpacked

        with use_tensor_parallel(self.tp), torch.no_grad(), unpacked(list(self.model.modules())):
            loaded: set[str] | None = self.model.load_weights(weights)  # type: ignore[operator]
        return loaded

    def logits(self, hidden: Tensor, view: RowView | None = None) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocabulary] fp32."""
        arguments = [SamplingMetadata()] if "sampling_metadata" in self._logits_names else []
        with use_tensor_parallel(self.tp):
            logits = self.model.compute_logits(hidden, *arguments)  # type: ignore[operator]
        return logits_of(self.model, logits, len(hidden), self.traits.vocab_size)

    def pool(self, hidden: Tensor, token_ids: Sequence[Tensor], params: Sequence[PoolingParams]) -> Sequence[Tensor]:
        """hidden: [tokens, hidden] of complete prompts one behind the other -> what the class makes of each."""
        with use_tensor_parallel(self.tp):
            return pool_with(self.model, hidden, token_ids, params)


_HEADS = {"compute_logits": "logits", "pooler": "pooler"}  # method -> what a model with it can be asked for


def states_of(model: nn.Module, hidden: Any, tokens: int) -> Tensor:
    """What a class's `forward` returned. Raises ValueError unless that is a row for each token."""
    if not isinstance(hidden, Tensor) or hidden.shape[:1] != (tokens,):
        raise ValueError(
            f"{type(model).__name__}.forward returned {_shown(hidden)}, expected the hidden states of all {tokens} "
            "tokens of the step."
        )
    return hidden


def logits_of(model: nn.Module, logits: Any, rows: int, vocab_size: int) -> Tensor:
    """What a class's `compute_logits` returned, in fp32. Raises ValueError unless that is [rows, vocabulary]."""
    if not isinstance(logits, Tensor) or logits.shape != (rows, vocab_size):
        raise ValueError(
            f"{type(model).__name__}.compute_logits returned {_shown(logits)}, expected a tensor of shape "
            f"{(rows, vocab_size)}: a row for each row of hidden states, a column for each token of the vocabulary."
        )
    return logits.float()


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def pool_with(
    model: nn.Module, hidden: Tensor, token_ids: Sequence[Tensor], params: Sequence[PoolingParams]
) -> list[Tensor]:
    """What a class's `pooler` makes of each prompt. hidden: [tokens, hidden] of all of them."""
    with torch.inference_mode():
        found = model.pooler(hidden, PoolingMetadata.of(token_ids, params, hidden.device))  # type: ignore[operator]
    results = list(PoolerOutput(getattr(found, "outputs", found)))
    missing = next((i for i, result in enumerate(results) if result is None), None)
    if missing is not None:
        raise ValueError(f"{type(model).__name__}.pooler gave nothing for prompt {missing} of {len(results)}.")
    return [torch.as_tensor(result) for result in results]


def load_out_of_tree(
    model_cls: type[nn.Module], vllm_config: VllmConfig, device: torch.device, tp: TensorParallel, weights: Weights
) -> tuple[OutOfTreeModel | DerivedModel, int]:
    """Build a user's model on `device`, give its `load_weights` the checkpoint; (wrapped model, bytes of weights)."""
    from vllm.model_executor.models.architecture_classes import (
        ArchitectureModel,
        DerivedModel,
        building,
        fill_derived,
    )

    vllm_config = _with_pooler_config(vllm_config, model_cls)
    config = vllm_config.model_config
    dtype = dtype_of(config.dtype)
    with use_tensor_parallel(tp), building(vllm_config, device), torch.device(device), _default_dtype(dtype):
        model = model_cls(**_init_arguments(model_cls, vllm_config))
    if isinstance(model, ArchitectureModel):
        names = _parameter_names(model.forward), _parameter_names(model.compute_logits)
        with use_tensor_parallel(tp), torch.no_grad():
            size = fill_derived(model, weights, device, config.seed or 0)
        return DerivedModel(model, *names), size
    wrapped = OutOfTreeModel(model, config.hf, dtype, config.max_model_len, tp)
    with use_tensor_parallel(tp), torch.no_grad():
        if weights is None:
            _fill_with_random_numbers(model)
        elif isinstance(weights, rank_state.RankState):
            rank_state.fill_plain(wrapped, weights)
        else:
            _mark(model)
            loaded = model.load_weights((name, tensor) for name, tensor, _ in weights)  # type: ignore[operator]
            _check_loaded(model, loaded)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, ProcessesWeights):
            module.process_after_load()
    return wrapped, size


def _with_pooler_config(vllm_config: VllmConfig, model_cls: type[nn.Module]) -> VllmConfig:
    """With `model_config.pooler_config` as it was resolved, which classes that pool read. Where nobody says otherwise
    the class does (`interfaces_base.default_pooling_type`).
    """
    config = vllm_config.model_config
    if config.pooling is None:
        return vllm_config
    made = config.pooling.as_config()
    given = config.pooler_config if config.pooler_config is not None else config.override_pooler_config
    said = given is not None and PoolerConfig.of(given, "pooler_config").pooling_type is not None
    files = read_sentence_files(config.path)
    default = getattr(model_cls, DEFAULT_POOLING_TYPE, None)
    if default is not None and not said and (files is None or files.type is None):
        made.pooling_type = default
    return replace(vllm_config, model_config=replace(config, pooler_config=made))


def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _init_arguments(model_cls: type[nn.Module], vllm_config: VllmConfig) -> dict[str, Any]:
    """What the class's constructor asks for, by name. Raises TypeError for a required argument nobody knows."""
    parameters = inspect.signature(model_cls).parameters
    known: dict[str, Callable[[], Any]] = {
        "vllm_config": lambda: vllm_config,
        "prefix": lambda: "",
        "config": lambda: vllm_config.model_config.hf_config,
        "cache_config": lambda: vllm_config.cache_config,
        "quant_config": lambda: vllm_config.quant_config,
        "lora_config": lambda: vllm_config.lora_config,
        "scheduler_config": lambda: vllm_config.scheduler_config,
        "multimodal_config": lambda: None,
        "linear_method": lambda: None,
    }
    required = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in known
    ]
    if required:
        raise TypeError(
            f"{model_cls.__name__}.__init__ requires {', '.join(required)}, which the engine cannot give. "
            f"Known arguments: {', '.join(known)}."
        )
    return {name: make() for name, make in known.items() if name in parameters}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _mark(model: nn.Module) -> None:
    """Fill every parameter with NaN, so that one which is not loaded can be told."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))


def _check_loaded(model: nn.Module, loaded: Any) -> None:
    """Every parameter must be among those that `load_weights` reports, or, if it reports none, hold no mark."""
    names = {name for name, _ in model.named_parameters()}
    missing = sorted(names - loaded if isinstance(loaded, set | frozenset) else _marked(model))
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ValueError(f"Following weights were not initialized from checkpoint: {shown}.")


def _marked(model: nn.Module) -> Iterator[str]:
    """The parameters that still hold a mark. Of a vocabulary, rows that no token has may: they become zeros."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, VocabParallelEmbedding)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        left = parameter.isnan()
        if left.all() and parameter.numel() or (left.any() and id(parameter) not in tables):
            yield name
        elif left.any():
            parameter.data.masked_fill_(left, 0.0)


def _fill_with_random_numbers(model: nn.Module) -> None:
    """Small random matrices, vectors as the model initialised them."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.data.uniform_(-0.035, 0.035, generator=generator)
