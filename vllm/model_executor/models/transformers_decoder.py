"""Any decoder of transformers as the engine knows models: its own modules around our attention and our paged cache.

transformers lets a library register an attention function by name; ours writes the step's keys and values to the
layer's cache and attends to it. All tokens of a step go through the modules as one row of a batch, so whatever mixes
tokens other than by that function would mix requests. Nothing is assumed about a model's code: it runs a few tokens
before it is used (`_Rehearsal`), and from that the engine learns what each layer keeps, and refuses a model that it
would get wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.layer import Attention
from vllm.distributed import TensorParallel
from vllm.model_executor.models.kv_groups import group_layers, kv_places
from vllm.model_executor.models.traits import Traits
from vllm.step.inputs import RowView, StepInputs
from vllm.step.kv_need import attention_need

_NAME = "vllm_paged"  # of our attention function
_REHEARSAL = "vllm_rehearsal"  # the same, with masks described, so that they can be read
_LAYER = "vllm_attention"  # the child of an attention module that has the cache
_FAR = 10**6
_TOKENS = 7
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
# Arguments of attention functions that say nothing about the result.
_HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
     "output_router_logits", "return_dict", "position_embeddings", "past_key_values", "past_key_value", "is_causal"}
)  # fmt: skip


class TransformersDecoder(nn.Module):
    """A causal language model of transformers, its weights loaded, on one rank.

    module: built by `build`, its linear layers perhaps replaced by this rank's parts of them.
    Raises ValueError if the model is no decoder whose tokens meet in causal attention only.
    """

    def __init__(
        self, module: nn.Module, name: str, dtype: torch.dtype, max_positions: int, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.cache_scales: dict[int, tuple[float, float]] = {}
        self.module, self.name, self.dtype, self.tp = module, name, dtype, tp
        self._base: list[nn.Module] = [_base_of(module, name)]  # in a list, so that it does not become a child twice
        self._head = [_without_base(module)]
        seen = _Rehearsal(self)
        self._output_class = seen.output_class
        self.layers = [call.layer() for call in seen.calls]
        for call, layer in zip(seen.calls, self.layers, strict=True):
            call.module.add_module(_LAYER, layer)
            window = layer.sliding_window
            window = window if window is not None and window < max_positions else None
            layer.sliding_window, layer.params = window, replace(layer.params, window=window)
        kv = tuple(attention_need(layer.num_kv_heads, layer.head_size, layer.sliding_window) for layer in self.layers)
        places = kv_places(group_layers(kv), kv)
        for index, layer in enumerate(self.layers):
            layer.place = places[index]
        self.traits = Traits(seen.hidden_size, dtype, seen.vocab_size, kv, range(len(kv)))

    def forward(self, step: StepInputs, kv_caches: Sequence[Tensor]) -> Tensor:
        """Hidden states of the tokens in `step.logits_rows`, [rows, hidden]."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.bound(kv_caches, step))
            hidden = self.run(step.token_ids, step.positions).last_hidden_state[0]
        return step.wanted(hidden)

    def run(self, token_ids: Tensor, positions: Tensor | None) -> Any:
        """What the modules below the head make of one row of tokens. positions: None if the model shall number them."""
        rows = None if positions is None else positions[None]
        return self._base[0](input_ids=token_ids[None], position_ids=rows, use_cache=False)

    def paged_attention(self) -> dict[int, Attention]:
        """The attention layers, in order."""
        return dict(enumerate(self.layers))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Give weights of the loaded model new values, under their checkpoint's names; the module's names of them.

        Tensors that transformers joins (the experts of a layer) must come in one call. Raises ValueError for a tensor
        that the model lacks, that does not fit, or whose place is quantized.
        """
        from vllm.model_executor.model_loader.transformers_weights import load_again

        return load_again(self.module, weights)

    def logits(self, hidden: Tensor, view: RowView | None = None) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocabulary] fp32, with all that the model's own head does."""
        given = self._head[0].get_submodule(self.module.base_model_prefix)  # type: ignore[arg-type]
        assert isinstance(given, _Given)
        if not len(hidden):
            return hidden.new_zeros((0, self.traits.vocab_size), dtype=torch.float32)
        with given.giving(self._output_class(last_hidden_state=hidden[None])):
            logits: Tensor = self._head[0](use_cache=False).logits
        return logits[0].float()


def build(config: Any, dtype: torch.dtype, *, trust_remote_code: bool, name: str, grouped: bool) -> nn.Module:
    """The modules of a transformers config, parameters on "meta", buffers on the CPU, with our attention.

    grouped: experts may be computed as one grouped product, where their sizes allow it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(_NAME, _paged_attention)
    AttentionInterface.register(_REHEARSAL, _paged_attention)
    AttentionMaskInterface.register(_REHEARSAL, _describe_mask)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the engine reads quantized weights itself
    try:
        with _parameters_on_meta():
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_NAME, trust_remote_code=trust_remote_code
            )
    except (ValueError, KeyError, ImportError, AttributeError) as error:
        raise ValueError(f"{name}: transformers cannot build this model with our attention: {error}") from error
    if not getattr(module, "_supports_attention_backend", False):
        raise ValueError(
            f"{name} cannot run through transformers here: its code does not take an attention function from outside "
            "(`_supports_attention_backend`)."
        )
    module.tie_weights()
    # an implementation that groups products reads rows of whole 16 bytes
    stacks = [p for p in module.parameters() if p.dim() == 3]
    if not grouped or any(size * p.element_size() % 16 for p in stacks for size in p.shape[1:]):
        module.config._experts_implementation = "eager"
    found: nn.Module = module.eval().requires_grad_(False)
    return found


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, parameters lose their memory as soon as a module has them; buffers, which code computes, stay."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _base_of(module: nn.Module, name: str) -> nn.Module:
    prefix: str = module.base_model_prefix  # type: ignore[assignment]
    base = module._modules.get(prefix)
    if base is None:
        raise ValueError(f"{name} cannot run through transformers here: it has no {prefix!r} below its head.")
    return base


def _without_base(module: nn.Module) -> nn.Module:
    """The same model, sharing all weights, with a `_Given` in place of all that is below its head."""
    head = copy.copy(module)
    prefix: str = module.base_model_prefix  # type: ignore[assignment]
    head._modules = {**module._modules, prefix: _Given(module.get_submodule(prefix))}
    return head


class _Given(nn.Module):
    """Stands for the modules below a head, and for those among them that a head may call itself (`model.decoder`):
    hands out what it was given.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._output: Any = None
        self._names = frozenset(base._modules)

    def __getattr__(self, name: str) -> Any:
        return self if name in self.__dict__.get("_names", ()) else super().__getattr__(name)

    @contextmanager
    def giving(self, output: Any) -> Iterator[None]:
        self._output = output
        try:
            yield
        finally:
            self._output = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output


# -- attention ---------------------------------------------------------------------------------------------------------


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function. query, key, value: [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    layer = module._modules.get(_LAYER)
    if isinstance(layer, Attention):
        return _attend(layer, query, key, value), None
    rehearsal = _CURRENT.get()
    if rehearsal is None:
        raise RuntimeError(f"{type(module).__name__} was called outside of the engine.")
    call = _Call(module, query.shape, key.shape, value.shape, scaling, sliding_window, softcap, attention_mask, more)
    return rehearsal.take(call, query, key, value), None


def _attend(layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    size, heads, tokens, width = layer.head_size, query.shape[1], query.shape[2], value.shape[3]
    q, k, v = (_rows(x, size) for x in (query, key, value))
    out: Tensor = layer(q, k, v)
    return out.view(1, tokens, heads, size)[..., :width]


def _rows(x: Tensor, size: int) -> Tensor:
    """[1, heads, tokens, width] -> [tokens, heads * size], zeros behind each head's width."""
    x = x[0].transpose(0, 1)
    if x.shape[-1] < size:
        x = nn.functional.pad(x, (0, size - x.shape[-1]))
    return x.reshape(x.shape[0], -1)


@dataclass(frozen=True)
class _Mask:
    """What a mask allows, in place of its tensor. window: tokens each query sees, itself included; None: all before."""

    causal: bool
    window: int | None


def _describe_mask(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any) -> _Mask:
    """transformers' mask function: asks at the places where masks of different kinds differ."""

    def allows(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(i) for i in (0, 0, query, key))))

    far = _FAR if local_size is None else local_size
    sees = [(5, 5), (far + 3, 4), (far + 3, far + 3), (far, 1)]
    hidden = [(4, 5), (far + 1, far + 2), *([] if local_size is None else [(far + 4, 4), (far, 0)])]
    causal = all(allows(*at) for at in sees) and not any(allows(*at) for at in hidden)
    return _Mask(causal, local_size)


@dataclass(frozen=True)
class _Call:
    """One call of the attention function, as a module made it."""

    module: nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    scaling: float | None
    window: int | None
    softcap: float | None
    mask: Any
    more: dict[str, Any]

    def layer(self) -> Attention:
        """The layer that computes such calls."""
        size = max(self.query[3], self.value[3])
        scale = self.query[3] ** -0.5 if self.scaling is None else self.scaling
        window = self.mask.window if isinstance(self.mask, _Mask) else self.window
        return Attention(
            self.query[1],
            size,
            scale,
            num_kv_heads=self.key[1],
            per_layer_sliding_window=window,
            logits_soft_cap=self.softcap,
            prefix=type(self.module).__name__,
        )

    def problem(self) -> str | None:
        """Why this engine's attention would compute something else; None if it does not."""
        unknown = sorted(name for name, value in self.more.items() if value is not None and name not in _HARMLESS)
        if unknown:
            return f"its attention uses {', '.join(unknown)}"
        if self.more.get("is_causal") is False:
            return "its attention is not causal"
        if self.mask is None:
            return None if getattr(self.module, "is_causal", True) else "its attention is not causal"
        if not isinstance(self.mask, _Mask):
            return "it builds an attention mask of its own"
        if not self.mask.causal:
            return "its mask is neither causal nor a plain window"
        if self.window is not None and self.mask.window is not None and self.window != self.mask.window:
            return f"its window is {self.window} tokens by one setting and {self.mask.window} by another"
        if self.window is not None and self.mask.window is None:
            return f"its mask has no window, and its attention one of {self.window} tokens"
        return None


# -- the rehearsal -----------------------------------------------------------------------------------------------------

_CURRENT: ContextVar[_Rehearsal | None] = ContextVar("rehearsal", default=None)


@dataclass
class _Rehearsal:
    """Runs a few tokens through a model whose attention only looks at each token itself.

    calls: what each attention layer asked for, in order.   output_class: of the modules below the head.

    Such a model is a function of each token and its position, so that tokens in another order give the same results in
    that order. If they do not, the model has a state, a convolution, or positions of its own, and is refused.
    """

    model: TransformersDecoder
    calls: list[_Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, name = self.model, self.model.name
        device = next(model.module.parameters()).device
        generator = torch.Generator().manual_seed(0)
        vocabulary: int = model.module.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        ids = torch.randint(0, vocabulary, (_TOKENS,), generator=generator).to(device)
        token = _CURRENT.set(self)
        try:
            with torch.inference_mode(), _implementation(model.module, _REHEARSAL):
                output = model.run(ids, torch.arange(_TOKENS, device=device))
            self._check_calls(name)
            calls = list(self.calls)
            with torch.inference_mode():
                numbered = model.run(ids, None).last_hidden_state[0]
            positions = torch.tensor([2, 11, 5, 0, 7, 3, 12], device=device)
            order = torch.tensor([4, 0, 6, 2, 5, 1, 3], device=device)
            with torch.inference_mode():
                straight = model.run(ids, positions).last_hidden_state[0]
                shuffled = model.run(ids[order], positions[order]).last_hidden_state[0]
            self.calls = calls
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{name} cannot run through transformers here: its code does not work with an attention function of "
                f"ours ({error})."
            ) from error
        finally:
            _CURRENT.reset(token)
        difference = (straight[order].float() - shuffled.float()).norm() / straight.float().norm()
        if not difference <= _TOLERANCE[model.dtype]:
            raise ValueError(
                f"{name} cannot run through transformers here: it is no attention-only decoder. Its tokens meet "
                "outside of attention (a recurrent state or a convolution), or it counts positions by itself."
            )
        plain = output.last_hidden_state[0].float()
        if not (numbered.float() - plain).norm() / plain.norm() <= _TOLERANCE[model.dtype]:
            raise ValueError(
                f"{name} cannot run through transformers here: it numbers the positions of its tokens in a way of its "
                "own, not from 0 on."
            )
        self.output_class: type = type(output)
        self.hidden_size: int = straight.shape[-1]
        with torch.inference_mode():
            head = model._head[0]
            given = head.get_submodule(model.module.base_model_prefix)  # type: ignore[arg-type]
            with given.giving(output):  # type: ignore[operator]
                self.vocab_size: int = head(use_cache=False).logits.shape[-1]

    def take(self, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Something that each token can compute alone and that depends on all it brings. -> [1, tokens, heads, size]"""
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{self.model.name} cannot run through transformers here: its attention reads {key.shape[2]} keys for "
                f"{query.shape[2]} tokens."
            )
        self.calls.append(call)
        share = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        seen = torch.tanh(query.float().mean(-1, keepdim=True)) + torch.tanh(k[..., :1].float())
        return (v * (1 + 0.5 * seen).to(v.dtype)).transpose(1, 2).contiguous()

    def _check_calls(self, name: str) -> None:
        if not self.calls:
            raise ValueError(f"{name} cannot run through transformers here: it never calls its attention function.")
        if len({id(call.module) for call in self.calls}) < len(self.calls):
            raise ValueError(
                f"{name} cannot run through transformers here: it uses an attention layer twice per token."
            )
        for call in self.calls:
            problem = call.problem()
            if problem is not None:
                raise ValueError(f"{name} cannot run through transformers here: {problem}.")


@contextmanager
def _implementation(module: nn.Module, name: str) -> Iterator[None]:
    config: Any = module.config
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = _NAME
