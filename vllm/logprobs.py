"""Public path of the log probability types; they live in `vllm.sequence`."""

from vllm.sequence import Logprob, PromptLogprobs, SampleLogprobs

__all__ = ["Logprob", "PromptLogprobs", "SampleLogprobs"]
