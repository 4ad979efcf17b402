"""Which reasoning parsers there are, by the names that `--reasoning-parser` takes, and where thoughts end in tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.reasoning.think import Begins, ThinkFormat

if TYPE_CHECKING:
    from vllm.engine.tokenizer import Tokenizer

GPT_OSS = "openai_gptoss"  # harmony has channels instead of tags: vllm.tool_parsers.harmony
_FINAL = re.compile(r"<\|channel\|>final(?:[^<]{0,64}|<\|constrain\|>){0,4}<\|message\|>")
_LOOK_BACK = 64  # tokens that a marker spelled in ordinary tokens may have
_THOUGHTS_BACK = 1024  # tokens of a prompt that are looked at for thoughts that go on in its output
_INSTRUCTIONS = 4096  # tokens of a prompt that may say how thoughts are marked

FORMATS: dict[str, ThinkFormat] = {
    "deepseek_r1": ThinkFormat(opens_itself=True),
    "deepseek_v3": ThinkFormat(),
    "qwen3": ThinkFormat(),
    "glm45": ThinkFormat(),
    "glm47": ThinkFormat(),
    "granite": ThinkFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "mistral": ThinkFormat(("[THINK]", "<think>"), ("[/THINK]", "</think>")),
    "kimi_k2": ThinkFormat(
        opens_itself=True, other_ends=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    ),
    "step3": ThinkFormat(opens_itself=True),
    "minimax_m2": ThinkFormat(opens_itself=True),
    "nemotron_v3": ThinkFormat(opens_itself=True),
    "ernie45": ThinkFormat(opens_itself=True),
    "seed_oss": ThinkFormat(("<seed:think>",), ("</seed:think>",)),
    "cohere": ThinkFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
}
NAMES = (*FORMATS, GPT_OSS)


class ReasoningEnd:
    """Finds the end of the thoughts in token ids, for what may begin only after it, such as a grammar."""

    def __init__(self, form: ThinkFormat | None, tokenizer: Tokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer
        marks = (*form.ends, *form.other_ends) if form is not None else ()
        ids = {mark: tokenizer.token_to_id(mark) for mark in marks}
        self._after = {ids[mark] for mark in form.ends if ids[mark] is not None} if form else set()
        self._at = {ids[mark] for mark in form.other_ends if ids[mark] is not None} if form else set()
        spelled = [mark for mark in marks if ids[mark] is None and mark not in (form.other_ends if form else ())]
        self._pattern = _FINAL if form is None else re.compile("|".join(map(re.escape, spelled)) or "(?!)")
        self._has_pattern = form is None or bool(spelled)

    def begins(self, ids: Sequence[int]) -> Begins:
        """Where the output begins after a prompt of which nobody knows who has said what: any of it may be the model's
        own, so that thoughts go on which are open there.
        """
        if self._form is None:
            return Begins.SPEAKING if self.find(ids, max(0, len(ids) - 16)) == len(ids) else Begins.THINKING
        tail = self._text(ids[-_THOUGHTS_BACK:])
        if self._form.begins(tail, tail) is Begins.THINKING:
            return Begins.THINKING
        return self._form.begins(tail)

    def openings(self, ids: Sequence[int], begins: Begins | None = None) -> tuple[tuple[int, ...], ...] | None:
        """The tokens with which an output may open thoughts before its answer, in each way that there is; None if it
        begins inside thoughts. A tag that is no token can only be written by a model that the prompt tells of it.

        begins: where the output begins; None if that is to be read from the prompt's tokens, `ids`.
        """
        begins = begins or self.begins(ids)
        if begins is Begins.SPEAKING:
            return ()
        if self._form is None or self._form.opens_itself or begins is Begins.THINKING:
            return None
        starts = self._form.starts
        tokens = [token for token in map(self._tokenizer.token_to_id, starts) if token is not None]
        if tokens:
            return tuple((token,) for token in tokens)
        head, tail = self._text(ids[:_INSTRUCTIONS]), self._text(ids[-_THOUGHTS_BACK:])
        return tuple(tuple(self._tokenizer.encode(start, False)) for start in starts if start in head or start in tail)

    def opens(self, ids: Sequence[int]) -> bool:
        """Whether an output begins with the opening tag of thoughts."""
        if self._form is None:
            return False
        return self._text(ids[:_LOOK_BACK]).lstrip().startswith(self._form.starts)

    def find(self, ids: Sequence[int], start: int) -> int:
        """Index of the first token after the thoughts; -1 if they have not ended. Tokens before `start` were looked at,
        but a marker may have begun among them.
        """
        for i in range(start, len(ids)):
            if ids[i] in self._after:
                return i + 1
            if ids[i] in self._at:  # it belongs to what follows
                return i
        if not self._has_pattern:
            return -1
        first = max(0, start - _LOOK_BACK)
        text, ends = "", []
        for token in ids[first:]:
            text += self._tokenizer.token_text(token)
            ends.append(len(text))
        found = self._pattern.search(text)
        if found is None:
            return -1
        return first + next(i for i, end in enumerate(ends) if end >= found.end()) + 1

    def _text(self, ids: Sequence[int]) -> str:
        return "".join(map(self._tokenizer.token_text, ids))


def reasoning_end(name: str, tokenizer: Tokenizer) -> ReasoningEnd:
    """Where the thoughts of the models end that `--reasoning-parser name` is for. Raises ValueError for other names."""
    return ReasoningEnd(think_format(name), tokenizer)


def think_format(name: str) -> ThinkFormat | None:
    """The tags of a reasoning parser, None for gpt-oss, which has channels. Raises ValueError for unknown names."""
    if name == GPT_OSS:
        return None
    if name not in FORMATS:
        raise ValueError(f"Unknown reasoning parser {name!r}: expected one of {', '.join(NAMES)}.")
    return FORMATS[name]
