"""Renders chat templates of strangers: in a process of its own, with limits of memory and time.

What a template can do to the process that renders it (build texts of any size, loop) is too much to bound filter by
filter. The process is asked for one prompt after the other, in JSON.
"""

from __future__ import annotations

import json
import os
import resource
import threading
from typing import Any

from vllm.entrypoints.chat_template import MAX_SECONDS, TemplateLimitError
from vllm.ipc.helper import Helper, Questions

MAX_MEGABYTES = 256  # beyond what the process needs by itself
START_SECONDS = 30.0
# The environment may hold keys, and a template has no need of any of it.
_KEPT_VARIABLES = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ")


class TemplateProcess:
    """Started with the first job, and again after one that had to be ended. One job at a time; any thread may call."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        self._helper = Helper(__name__, {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ})
        self._lock = threading.Lock()

    def render(self, **job: Any) -> str:
        """The prompt of a conversation, see `chat_utils.apply_chat_template`; `job` has its arguments, all plain data,
        and `special_tokens`.

        Raises ValueError, saying what is wrong with messages or template, and TemplateLimitError.
        """
        with self._lock:
            try:
                answer = self._ask(job)
            except BaseException:
                self._helper.end()
                raise
            if answer.get("last"):  # it has grown
                self._helper.end()
        if "text" in answer:
            return str(answer["text"])
        raise (TemplateLimitError if answer["kind"] == "limit" else ValueError)(answer["error"])

    def close(self) -> None:
        """End the process, also in the middle of a job."""
        self._helper.kill()
        with self._lock:
            self._helper.end()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if not self._helper.is_running:
            self._helper.start(b"", START_SECONDS)
        try:
            answer: dict[str, Any] = json.loads(self._helper.ask(json.dumps(job).encode(), self._seconds))
            return answer
        except TimeoutError:
            raise TemplateLimitError(
                f"The chat template took longer than {self._seconds:g} seconds to render."
            ) from None
        except EOFError:
            raise TemplateLimitError(_NEEDS_TOO_MUCH) from None


_NEEDS_TOO_MUCH = f"The chat template needs more than {MAX_MEGABYTES} MB of memory for these messages."


# -- the process -------------------------------------------------------------------------------------------------------


class _Specials:
    """What rendering needs of a tokenizer."""

    chat_template = None

    def __init__(self, special_tokens: dict[str, str]) -> None:
        self.special_tokens = special_tokens


def _rendered(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.entrypoints.chat_utils import apply_chat_template

    tokenizer: Any = _Specials(job.pop("special_tokens"))
    try:
        return {"text": apply_chat_template(tokenizer, job.pop("messages"), **job)}
    except MemoryError:
        return {"kind": "limit", "error": _NEEDS_TOO_MUCH}
    except TemplateLimitError as error:
        return {"kind": "limit", "error": str(error)}
    except Exception as error:
        if isinstance(error.__cause__, MemoryError):
            return {"kind": "limit", "error": _NEEDS_TOO_MUCH}
        return {"kind": "value", "error": str(error)[:2000]}


def _pages() -> int:
    """How large the address space is."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0])


def main() -> None:
    """Answer until the other end is closed."""
    questions = Questions()
    from vllm.entrypoints import chat_utils

    os.nice(5)
    chat_utils.apply_chat_template(_Specials({}), [{"role": "user", "content": ""}], chat_template="{{ 1 }}")  # type: ignore[arg-type]
    page = os.sysconf("SC_PAGE_SIZE")
    most = _pages() * page + (MAX_MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked = iter(questions)
    next(asked)  # whether it is there
    questions.answer(b"")
    for question in asked:
        answer = _rendered(json.loads(question))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in KB
        questions.answer(json.dumps({**answer, "last": grown > 64 << 10}).encode())


if __name__ == "__main__":
    main()
