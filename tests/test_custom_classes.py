"""Schedulers, executors, stat loggers and platforms of a user's own, by class or by path."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.custom_classes import CountingExecutor, NotingLogger, ShyScheduler
from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=6)
ROOT = Path(__file__).parents[1]


def answers(**options: Any) -> list[str]:
    with LLM("demo", **{"max_model_len": 256, "max_num_seqs": 4, "device": "cpu", **options}) as llm:
        prompts = ["The capital of France is", "Once upon a time"]
        return [output.outputs[0].text for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    "cls", [ShyScheduler, "tests.custom_classes.ShyScheduler", "tests.custom_classes:ShyScheduler"]
)
def test_a_scheduler_of_ones_own_plans(cls: Any) -> None:
    ShyScheduler.most = 0
    assert answers(scheduler_cls=cls)[0].startswith(" Paris")
    assert ShyScheduler.most == 2


@pytest.mark.parametrize("cls", [CountingExecutor, "tests.custom_classes.CountingExecutor"])
def test_an_executor_of_ones_own_runs_the_steps(cls: Any) -> None:
    CountingExecutor.steps = 0
    assert answers(distributed_executor_backend=cls)[0].startswith(" Paris")
    assert CountingExecutor.steps >= 6


def test_a_stat_logger_hears_of_every_step_by_path_class_or_object() -> None:
    NotingLogger.heard.clear()
    args = EngineArgs("demo", max_model_len=256, max_num_seqs=4, device="cpu")
    loggers = {"path": "tests.custom_classes.NotingLogger", "class": NotingLogger}
    engine = LLMEngine.from_engine_args(args, stat_loggers=loggers)
    engine.add_request("0", "Hello", PARAMS)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    engine.shutdown()
    assert len(NotingLogger.heard) >= 2 * steps > 0
    heard = NotingLogger.heard[::2]
    assert sum(stats.num_generation_tokens_iter for stats in heard) == PARAMS.max_tokens
    assert sum(stats.num_prompt_tokens_iter for stats in heard) == sum(
        n for s in heard for n in s.num_prompt_tokens_requests
    )
    assert [n for stats in heard for n in stats.num_generation_tokens_requests] == [PARAMS.max_tokens]
    assert [reason for stats in heard for reason in stats.finished_reason_requests] == ["length"]
    (first,) = [seconds for stats in heard for seconds in stats.time_to_first_tokens_iter]
    later = [seconds for stats in heard for seconds in stats.time_per_output_tokens_iter]
    (whole,) = [seconds for stats in heard for seconds in stats.time_e2e_requests]
    assert len(later) == PARAMS.max_tokens - 1 and 0 < first < first + sum(later) <= whole + 1e-3
    assert max(stats.num_running_sys for stats in heard) == 1 and heard[-1].now > heard[0].now > 0

    async def serve() -> None:
        NotingLogger.heard.clear()
        args = AsyncEngineArgs("demo", max_model_len=256, max_num_seqs=4, device="cpu")
        engine = AsyncLLMEngine.from_engine_args(args, stat_loggers={"path": "tests.custom_classes:NotingLogger"})
        async for _ in engine.generate("Hello", PARAMS, "0"):
            pass
        await engine.do_log_stats()
        await engine.shutdown()

    asyncio.run(serve())
    assert NotingLogger.heard


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheduler_cls": "tests.custom_classes.NotingLogger"},
            "must name a subclass of vllm.core.scheduler.Scheduler",
        ),
        ({"scheduler_cls": "tests.nobody.Scheduler"}, "cannot be imported"),
        ({"scheduler_cls": "Scheduler"}, "must be a class or its path"),
        (
            {"distributed_executor_backend": "tests.custom_classes.ShyScheduler"},
            "must name a class like",
        ),
        ({"distributed_executor_backend": "fast"}, "Unrecognized distributed executor backend fast"),
        ({"device": "abacus"}, "device must be one of"),
    ],
)
def test_what_is_no_such_class_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        answers(**options)


def test_a_class_of_the_script_itself_is_refused() -> None:
    class Local(ShyScheduler):
        pass

    with pytest.raises(ValueError, match="must stand in a module that every process can import"):
        answers(scheduler_cls=Local)


PROGRAM = """
from vllm import EngineArgs
from vllm.engine.metrics import stat_loggers_of
from vllm.platforms import current_platform, detect_device, platform_for
config = EngineArgs("demo", device="cpu").create_engine_config()
print(platform_for("cpu").get_device_name(), detect_device()[0], *stat_loggers_of(None, config))
"""


@pytest.mark.parametrize("abacus", [False, True])
def test_installed_plugins_bring_platforms_and_loggers(abacus: bool, tmp_path: Path) -> None:
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\ncpu = tests.custom_classes:offer_cpu\nabacus = tests.custom_classes:offer_abacus\n"
        "nonsense = tests.custom_classes:offer_nonsense\nbroken = tests.custom_classes:broken\n"
        "[vllm.stat_logger_plugins]\nnotes = tests.custom_classes:NotingLogger\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment |= {"ABACUS": "1"} if abacus else {}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    name, device, *loggers = ran.stdout.split()[-3:]
    assert (name, loggers) == ("abacus", ["notes"])
    assert device == "abacus" if abacus else device in ("cpu", "cuda")
    assert "The platform plug-in broken failed" in ran.stderr + ran.stdout
    assert "is no vllm.platforms.Platform" in ran.stderr + ran.stdout
