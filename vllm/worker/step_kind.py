"""What kind of step a plan is, said in full, so that a fast path can state by equality which kinds it runs.

A fast path names the needs of the sampler and the features of a step that it handles. A step that has any other takes
the general path: what is new is refused by whoever has not heard of it.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vllm.step.plan import StepPlan, used_fields
from vllm.worker.sample.params import ParamsTable

# fields of a plan that have had their effect when the forward pass begins
_BEFORE = frozenset({"transfers", "writes", "adapters"})
ANY_NEED = -1


class StepKind(msgspec.Struct, frozen=True):
    """One step.

    query: tokens that its longest row computes, if all rows sample behind their last token and have but drafts beside
    it; else 0.   needs: `Needs` of any row, as a number.
    features: fields of the plan that are not neutral, and "rows with adapters" and what else
    adapters ask for (`WorkerAdapters.features`), "prompt_logprobs", "other rotations" where a row's prompt is longer
    than `Traits.known_prompt`.
    """

    query: int
    needs: int
    features: frozenset[str]

    @classmethod
    def of(cls, plan: StepPlan, params: ParamsTable, adapted: frozenset[str] = frozenset()) -> StepKind:
        """adapted: the features that adapters of the rows (`WorkerAdapters.features`) and their prompts bring."""
        slots = plan.slots
        features = used_fields(plan) - _BEFORE | adapted
        if not len(slots):
            return cls(0, 0, features)
        if np.count_nonzero(params.wants_prompt[slots]):
            features |= {"prompt_logprobs"}
        longest = int(plan.num_tokens.max())
        decodes = longest == 1 or (plan.drafts is not None and bool((plan.num_tokens == plan.drafts + 1).all()))
        return cls(longest if decodes and plan.sample.all() else 0, params.union(slots), features)

    def within(self, needs: int, features: frozenset[str]) -> bool:
        """Whether the step has no others."""
        return not self.needs & ~needs and self.features <= features
