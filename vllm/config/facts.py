"""What settings need to know about a family of models beyond its config.json; each family states its own `Facts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config.hf import HFConfig


class Windows(Enum):
    """Which layers of a family see a window only. CONFIG: as `layer_types` or `sliding_window_pattern` of the config
    say, else all, if it has a `sliding_window`. ON_REQUEST: those from `max_window_layers` on, if `use_sliding_window`
    is set. NONE: no layer, whatever the config has.
    """

    CONFIG = "config"
    ON_REQUEST = "on_request"
    NONE = "none"


@dataclass(frozen=True)
class Pooling:
    """What an architecture pools, and how, where neither its files nor the user say otherwise.

    task: "embed", "classify" or "reward".   type: "LAST", "CLS", "MEAN", "ALL" or "STEP".
    normalize: to length 1.   softmax: over what the head gives, even one number; None: as for classes, see
    `PoolingSettings`.   step_tag: the token whose positions STEP picks, by its id.
    type_field: a field of the config that says the type, if it is there.
    """

    task: str
    type: str
    normalize: bool = False
    softmax: bool | None = None
    step_tag: int | None = None
    type_field: str = ""


@dataclass(frozen=True)
class Facts:
    """What is true of every model of a family.

    windows: which layers have one.   window_pattern: every so-manieth layer has none, where the config does not say.
    learned_positions: there is a vector for each position, and none past the last.
    wide_range: activations leave float16's range.
    length_has_scaling: the config's longest sequence includes the rope scaling, whatever its kind.
    rope_kinds: what the family's configs call a scaling -> its usual name.
    defaults: values of fields that a config.json leaves out, beyond or instead of transformers' class defaults.
    kv_heads: the number of key/value heads, where that takes more than reading it.
    attention: whether any layer has attention heads.
    encoder: every token sees the whole prompt, so that it is computed in one piece and leaves no cache.
    padding_positions: the first position is that behind the padding token's id; so many fewer can be used.
    pooling: of an architecture that pools; None for one that generates.
    known_prompt: the longest prompt whose keys are those of any prompt that goes on after it; None: there is none.
    """

    windows: Windows = Windows.CONFIG
    window_pattern: int | None = None
    has_window: Callable[[HFConfig, int], bool] | None = None
    learned_positions: bool = False
    wide_range: bool = False
    length_has_scaling: bool = False
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    kv_heads: Callable[[HFConfig], int] | None = None
    attention: bool = True
    encoder: bool = False
    padding_positions: bool = False
    pooling: Pooling | None = None
    known_prompt: Callable[[HFConfig], int | None] | None = None


USUAL = Facts()


def facts_of(architectures: Sequence[str], model_type: str) -> Facts:
    """Those of the built-in family of one of `architectures`, else of the one that models of `model_type` have."""
    from vllm.config.hf_defaults import architecture_of
    from vllm.model_executor.models.registry import family_of

    for name in (*architectures, architecture_of(model_type)):
        family = None if name is None else family_of(name)
        if family is not None:
            return family.facts
    return USUAL
