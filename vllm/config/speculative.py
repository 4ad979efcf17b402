"""Settings of speculative decoding. It does not exist yet: the values are checked, then refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config.fields import setting
from vllm.config.kinds import Choice, Flag, Integer, Json, Number, Text

_LATER = "Speculative decoding"
_METHODS = ("rejection_sampler", "typical_acceptance_sampler")


def _unknown_method(value: Any) -> str:
    return (
        "Expected acceptance_method to be either rejection_sampler or typical_acceptance_sampler. "
        f"Instead it is {value}"
    )


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: one object in newer versions, many settings in older ones."""

    speculative_config: dict[str, Any] | None = setting(
        None,
        Json(optional=True),
        "Method, draft model and number of tokens to speculate, as one JSON object.",
        later=_LATER,
    )
    speculative_model: str | None = setting(None, Text(optional=True), 'The draft model, or "[ngram]".', later=_LATER)
    speculative_model_quantization: str | None = setting(
        None, Text(optional=True), "How the draft model is quantized.", needs="speculative_model"
    )
    speculative_draft_tensor_parallel_size: int | None = setting(
        None,
        Integer(low=1, optional=True),
        "Devices that share each layer of the draft model.",
        flags=("-spec-draft-tp",),
        needs="speculative_model",
    )
    num_speculative_tokens: int | None = setting(
        None, Integer(optional=True), "Tokens to speculate per step.", later=_LATER
    )
    speculative_disable_mqa_scorer: bool = setting(
        False, Flag(optional=True), "Score speculated tokens as a batch.", needs="speculative_model"
    )
    speculative_max_model_len: int | None = setting(
        None, Integer(low=1, optional=True), "Longer sequences are not speculated on.", needs="speculative_model"
    )
    speculative_disable_by_batch_size: int | None = setting(
        None,
        Integer(optional=True),
        "Do not speculate with more waiting requests than this.",
        needs="speculative_model",
    )
    ngram_prompt_lookup_max: int | None = setting(
        None, Integer(optional=True), "The longest n-gram looked up in the prompt.", needs="speculative_model"
    )
    ngram_prompt_lookup_min: int | None = setting(
        None, Integer(optional=True), "The shortest n-gram looked up in the prompt.", needs="speculative_model"
    )
    spec_decoding_acceptance_method: str = setting(
        "rejection_sampler",
        Choice(values=_METHODS, error=_unknown_method),
        "How speculated tokens are accepted.",
        needs="speculative_model",
    )
    typical_acceptance_sampler_posterior_threshold: float | None = setting(
        None, Number(optional=True), "Lower bound of the probability of an accepted token.", needs="speculative_model"
    )
    typical_acceptance_sampler_posterior_alpha: float | None = setting(
        None, Number(optional=True), "Factor of the entropy in that bound.", needs="speculative_model"
    )
    disable_logprobs_during_spec_decoding: bool | None = setting(
        None,
        Flag(optional=True, value_follows=True),
        "Return no logprobs while speculating.",
        needs="speculative_model",
    )
    spec_method: str | None = setting(None, Text(optional=True), "Method of speculation.", later=_LATER)
    spec_model: str | None = setting(None, Text(optional=True), "The draft model.", later=_LATER)
    spec_tokens: int | None = setting(None, Integer(optional=True), "Tokens to speculate per step.", later=_LATER)

    def __post_init__(self) -> None:
        config = dict(self.speculative_config) if isinstance(self.speculative_config, Mapping) else {}
        model = self.speculative_model or self.spec_model or config.get("model") or config.get("method")
        count = self.num_speculative_tokens
        count = self.spec_tokens if count is None else count
        count = config.get("num_speculative_tokens") if count is None else count
        if count is not None and model is None and self.spec_method is None:
            raise ValueError("num_speculative_tokens was provided without speculative model.")
        if isinstance(count, int) and count <= 0:
            raise ValueError(f"Expected num_speculative_tokens to be greater than zero ({count}).")
        self._check_lookup(config)
        batch = self.speculative_disable_by_batch_size
        batch = config.get("disable_by_batch_size") if batch is None else batch
        if isinstance(batch, int) and batch < 2:
            raise ValueError(
                "Expect the batch size threshold of disabling speculative decoding is > 1, but got "
                f"self.disable_by_batch_size={batch}"
            )
        self._check_acceptance(config)

    def _check_lookup(self, config: dict[str, Any]) -> None:
        low = (
            self.ngram_prompt_lookup_min
            if self.ngram_prompt_lookup_min is not None
            else config.get("prompt_lookup_min")
        )
        high = (
            self.ngram_prompt_lookup_max
            if self.ngram_prompt_lookup_max is not None
            else config.get("prompt_lookup_max")
        )
        if isinstance(low, int) and low < 1:
            raise ValueError(f"prompt_lookup_min={low} must be > 0")
        if isinstance(high, int) and high < 1:
            raise ValueError(f"prompt_lookup_max={high} must be > 0")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise ValueError(f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}")

    def _check_acceptance(self, config: dict[str, Any]) -> None:
        method = config.get("acceptance_method", self.spec_decoding_acceptance_method)
        if method is None:
            raise ValueError(
                "acceptance_method is not set. Expected values are rejection_sampler or typical_acceptance_sampler."
            )
        if method not in _METHODS:
            raise ValueError(_unknown_method(method))
        threshold = self.typical_acceptance_sampler_posterior_threshold
        alpha = self.typical_acceptance_sampler_posterior_alpha
        if (threshold is not None and threshold <= 0) or (alpha is not None and alpha <= 0):
            raise ValueError(
                "Expected the posterior_threshold and posterior_alpha of typical_acceptance_sampler to be > 0. Instead "
                f"found posterior_threshold = {threshold} and posterior_alpha = {alpha}"
            )
