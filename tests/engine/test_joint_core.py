"""What ranks that follow the first one make of its answers, and who may have a core that is led."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.executor.configs import config_for
from vllm.engine.core import EngineCore
from vllm.engine.joint_core import Answer, JointCore
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.ipc import codec
from vllm.sampling_params import SamplingParams
from vllm.step.messages import CoreOutput, CoreRequest, CoreStats


class Following:
    """The executor of a rank that hears these answers."""

    is_first, must_be_led = False, True

    def __init__(self, *answers: Answer) -> None:
        self.answers = [codec.encode(answer) for answer in answers]
        self.is_shut_down = False

    def follow(self) -> bytes:
        return self.answers.pop(0)

    def shutdown(self) -> None:
        self.is_shut_down = True


def core(*answers: Answer) -> JointCore:
    return JointCore(cast(Any, None), cast(Any, Following(*answers)))


def test_answers_are_those_of_the_first_rank() -> None:
    said = [CoreOutput("a", [1, 2], finish_reason="length")]
    stats = CoreStats(num_running=3, prompt_tokens=4)
    found = core(Answer(1, "step", outputs=said, stats=stats), Answer(2, "step", stats=stats), Answer(3, "abort"),
                 Answer(4, "list_loras", value=[7]))  # fmt: skip
    assert found.step() == said and found.step() == [] and found.abort(["a"]) == [] and found.list_loras() == [7]
    assert found.stats().prompt_tokens == 8  # of both steps
    assert (found.stats().num_running, found.stats().prompt_tokens) == (3, 0)


@pytest.mark.parametrize(
    ("error", "kind"), [("VLLMValidationError", VLLMValidationError), ("ValueError", ValueError),
                        ("EngineDeadError", EngineDeadError), ("KeyboardInterrupt", RuntimeError)]
)  # fmt: skip
def test_errors_are_those_of_the_first_rank(error: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="why"):
        core(Answer(1, "step", error=(error, "why"))).step()


def test_what_a_rank_no_longer_waits_for_is_passed_over() -> None:
    """An interrupt has ended its first call before the answer was there."""
    found = core(Answer(1, "step"), Answer(2, "abort"), Answer(3, "pin_lora", value=True))
    found._calls = 1
    found.abort(["a"])
    assert found.pin_lora(1) is True


def test_ranks_that_are_asked_other_things_are_told() -> None:
    with pytest.raises(EngineDeadError, match="asks its engine to step, the first one to abort"):
        core(Answer(1, "abort")).step()
    with pytest.raises(EngineDeadError, match="asks its engine to step, the first one to step"):
        core(Answer(2, "step")).step()
    request = CoreRequest("a", [1, 2], SamplingParams(), seed=0)
    with pytest.raises(ValueError, match="other requests than the first one"):
        core(Answer(1, "add_requests", about=1)).add_requests([request])


def test_a_core_that_nobody_leads_is_refused(tmp_path: Path) -> None:
    executor = Following()
    with pytest.raises(ValueError, match="must be asked the same in the same order, as LLM"):
        EngineCore(config_for(Path("demo")), cast(Any, executor))
    assert executor.is_shut_down
