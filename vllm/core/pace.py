"""How many tokens a step may have. While answers are in progress: as many as bring the prompts that wait on in a few
steps, and no more than measured steps say take no longer than a limit. In a pipeline: few enough that all stages work.
"""

from __future__ import annotations

from vllm.step.sizes import rounded_down, rounded_up

_SHARE = 0.3  # of the newest measurement in the estimate
_LEAST = 256  # tokens beside those of the answers: prompts go on, whatever a step takes
_SHORT = 0.01  # seconds: a step that takes no longer is not made shorter
_ANSWER = 16  # tokens a step computes of a request that answers, drafts included, at most
_STEPS = 8  # in which prompts that wait are computed: then answers wait less, and weights are read for both at once
# Of a pipeline: large steps save a few percent of the time, and cost the last stage half a step's wait for the first,
# and the first one's for the last.
_MANY_STEPS = 16  # so many large steps' worth of prompts must have come for it to pay
_LAST_STEPS = 4  # of what is left then, smaller steps are made
_LEAST_OF_STAGES = 2048  # tokens: with fewer a GPU is not busy


class Pace:
    """Bounds the time between two tokens of an answer where other requests' prompts share its steps.

    The time of a step is counted from the end of the one before, where the device was busy with that, so that steps in
    flight are not counted twice.
    """

    def __init__(self, limit: float, max_num_batched_tokens: int, stages: int = 1) -> None:
        """limit: seconds, 0 for none.   stages: of a pipeline."""
        self._limit, self._most, self._stages = limit, max_num_batched_tokens, stages
        self._per_token = 0.0  # seconds; 0: not known yet
        self._ended = 0.0  # when the last step did
        self._answers = 0  # in the newest plan
        self._cut = 0  # tokens of prompts of which it has a part
        self._length = 0.0  # of a prompt, on average
        self._backlog = 0  # the most tokens that have waited since none did

    def came(self, length: int) -> None:
        """A prompt of so many tokens waits from now on."""
        self._length += (_SHARE if self._length else 1.0) * (length - self._length)

    def budget(self, waiting: int, expects: bool = False) -> int:
        """Tokens that the next step may have, of the sizes in `step.sizes`. waiting: requests without a slot.

        expects: whether somebody may come at any time who shall not wait longer than for a token of an answer.
        """
        answers = max(self._answers, int(expects))
        if not (self._limit and answers) and self._stages == 1:
            return self._most
        backlog = self._cut + int(waiting * self._length)
        self._backlog = max(self._backlog, backlog) if backlog else 0
        most = self._most
        if self._stages > 1 and (self._backlog < _MANY_STEPS * most or backlog < _LAST_STEPS * most):
            most = min(most, max(most // 2, _LEAST_OF_STAGES, answers))
        if not (self._limit and answers):
            return most
        allowed = least = answers + _LEAST  # a small step tells what tokens take
        if self._per_token:
            allowed = int(self._limit / self._per_token)
            least = max(least, int(min(_SHORT, self._limit) / self._per_token))
        wanted = min(allowed, answers + -(-self._backlog // _STEPS))
        return min(most, max(rounded_up(least), rounded_down(wanted)))

    def planned(self, num_tokens: list[int], cut: int) -> None:
        """A step of so many tokens of each request has been planned; so many tokens of their prompts are left."""
        if self._limit or self._stages > 1:
            self._answers, self._cut = _answers(num_tokens), cut

    def took(self, begun: float, now: float, num_tokens: list[int]) -> None:
        """A step of so many tokens of each request, planned at `begun`, has ended."""
        seconds, self._ended = now - max(begun, self._ended), now
        if not self._limit:
            return
        tokens = sum(num_tokens)
        if tokens >= _LEAST // 2 and tokens >= _answers(num_tokens) + _LEAST // 2:  # others say nothing of prompts
            found = seconds / tokens
            self._per_token = found if not self._per_token else self._per_token + _SHARE * (found - self._per_token)


def _answers(num_tokens: list[int]) -> int:
    """How many of the requests compute as few tokens as one that answers."""
    rows = len(num_tokens)
    return rows if sum(num_tokens) == rows else sum(n <= _ANSWER for n in num_tokens)
