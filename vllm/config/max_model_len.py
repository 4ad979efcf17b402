"""How long a sequence may be: derived from the model's config, checked against what the user wants."""

from __future__ import annotations

from vllm import envs
from vllm.config.hf import HFConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

_DEFAULT = 2048
# Every name under which configs state a longest sequence; the smallest counts.
_LENGTH_FIELDS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Scalings whose range is already in the length fields.
_LENGTH_INCLUDES_SCALING = frozenset({"default", "longrope", "llama3", "mrope"})


def resolve_max_model_len(
    requested: int | None, hf: HFConfig, disable_sliding_window: bool, longest: float = 1.0
) -> tuple[int, str]:
    """The longest sequence and why. longest: how many times as long the sequences of some adapter may be.

    Raises ValueError if `requested` is more than the model was made for (unless VLLM_ALLOW_LONG_MAX_MODEL_LEN is set).
    """
    key, derived = _derive(hf, disable_sliding_window)
    if derived is None:
        if requested is not None:
            return requested, "set by you"
        logger.warning("%s states no longest sequence; assuming %d. Set max_model_len to change it.", hf.file, _DEFAULT)
        return _DEFAULT, "the model states no longest sequence"
    if longest > 1.0:
        key, derived = f"{key} and long_lora_scaling_factors", int(derived * longest)
    if requested is None:
        return derived, f"from {key} of the model's config"
    if requested > derived:
        _check_longer(requested, derived, key, hf, disable_sliding_window)
    return requested, "set by you"


def _derive(hf: HFConfig, disable_sliding_window: bool) -> tuple[str, int | None]:
    lengths = {name: hf.get_int(name, default=None) for name in _LENGTH_FIELDS}
    stated = {name: length for name, length in lengths.items() if length is not None}
    facts = hf.facts
    if facts.known_prompt is not None and facts.known_prompt(hf) is not None and len(stated) > 1:
        stated.pop("seq_length", None)  # as long as those of training; longer ones are known to work
    key, derived = min(stated.items(), key=lambda item: item[1], default=("", None))
    if derived is not None and hf.facts.padding_positions:
        derived -= hf.pad_token_id + 1
    window = hf.sliding_window
    if disable_sliding_window and window is not None and (derived is None or window < derived):
        key, derived = "sliding_window", window
    rope = hf.rope
    if derived is None or rope.kind in _LENGTH_INCLUDES_SCALING or hf.facts.length_has_scaling:
        return key, derived
    if disable_sliding_window:
        raise NotImplementedError(
            "Disabling sliding window is not supported for models with rope_scaling. Please raise an issue so we can "
            "investigate."
        )
    original = rope.params["original_max_position_embeddings"] if rope.kind == "yarn" else derived
    return f"{key} and rope scaling", int(original * rope.params["factor"])


def _check_longer(requested: int, derived: int, key: str, hf: HFConfig, disable_sliding_window: bool) -> None:
    """Decide about a `requested` length above the derived one."""
    model_max_length = hf.get_int("model_max_length", default=None)
    if model_max_length is not None and requested <= model_max_length:
        if disable_sliding_window:
            raise NotImplementedError(
                "Disabling sliding window is not supported for models model_max_length in the config. Please raise an "
                "issue so we can investigate."
            )
        return
    message = (
        f"User-specified max_model_len ({requested}) is greater than the derived max_model_len "
        f"({key.partition(' ')[0]}={derived} or model_max_length={model_max_length} in model's config.json). This may "
        "lead to incorrect model outputs or CUDA errors."
    )
    if hf.facts.learned_positions:
        raise ValueError(f"{message} This model has no position embeddings beyond {derived}.")
    if not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        raise ValueError(f"{message} To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1")
    logger.warning("%s", message)


def without_sliding_window(hf: HFConfig) -> HFConfig:
    """The same config with full attention in every layer."""
    off = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    return HFConfig.from_dict({**hf.raw, **off}, hf.path)
