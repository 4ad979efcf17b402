"""Compiling in turns: what is quick never waits for what is slow, whatever crashes, hangs or is given up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from tests.structured_output.slow_library import STOPPED_BYTES
from vllm.structured_output import turns
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.turns import MAX_STOPPED, _Line, _processor_seconds, _Work
from vllm.structured_output.vocabulary import Vocabulary
from vllm.structured_output.worker import CompileProcess

MODULE = "tests.structured_output.slow_library"
LONG = 300.0


def make() -> CompileProcess:
    return CompileProcess("slow", Vocabulary((b"a", b"b"), (1,), lambda text: []), MODULE)


@pytest.fixture
def process() -> Iterator[CompileProcess]:
    made = make()
    yield made
    made.close()
    assert not [child for child in psutil.Process().children() if MODULE in child.cmdline()]


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text, "slow")


def worker_of(process: CompileProcess) -> psutil.Process:
    assert process._helper is not None and process._helper._process is not None
    return psutil.Process(process._helper._process.pid)


def wait_until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it never came about"
        time.sleep(5e-3)


def statuses(worker: psutil.Process) -> list[str]:
    found = []
    for copy in worker.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(copy.status())
    return found


def anonymous(process: psutil.Process) -> int:
    memory = process.memory_info()
    return memory.rss - memory.shared


def slow_ones(process: CompileProcess, file: Path, count: int) -> list[Future[bytes]]:
    return [process.build(spec(f"until {file} {i}"), LONG) for i in range(count)]


def test_quick_ones_overtake_slow_ones_of_which_few_have_copies(process: CompileProcess, tmp_path: Path) -> None:
    slow = slow_ones(process, tmp_path / "go", 40)
    for text in "abc":
        assert process.build(spec(text), LONG).result(60) == text.encode()
    assert not any(future.done() for future in slow)
    worker = worker_of(process)
    wait_until(lambda: statuses(worker).count(psutil.STATUS_STOPPED) == MAX_STOPPED)
    process.build(spec("d"), LONG).result(60)
    assert len(statuses(worker)) <= MAX_STOPPED + 2  # that has a turn, and that has had all
    (tmp_path / "go").touch()
    # What was stopped goes on, and what had to give its copy away begins again.
    assert [future.result(60) for future in slow] == [f"until {tmp_path / 'go'} {i}".encode() for i in range(40)]
    wait_until(lambda: not worker.children())


def test_what_is_stopped_holds_a_bounded_memory(process: CompileProcess) -> None:
    holding = [process.build(spec(f"hold {i}"), LONG) for i in range(12)]
    process.build(spec("quick"), LONG).result(60)
    worker = worker_of(process)
    wait_until(lambda: statuses(worker).count(psutil.STATUS_STOPPED) == 3)
    for _ in range(5):
        process.build(spec("quick"), LONG).result(60)
        os.kill(worker.pid, signal.SIGSTOP)  # while it is looked at
        stopped = [copy for copy in worker.children() if copy.status() == psutil.STATUS_STOPPED]
        held = sum(max(0, anonymous(copy) - anonymous(worker)) for copy in stopped)
        os.kill(worker.pid, signal.SIGCONT)
        assert 0 < held <= STOPPED_BYTES and len(stopped) < len(holding)


def test_of_those_that_wait_the_newest_and_the_oldest_go_on_in_turn() -> None:
    line = _Line(_Work(i, spec(""), LONG) for i in range(5))
    found = []
    while (work := line.next()) is not None:
        found.append(work.number)
        line.append(_Work(10 + len(found), spec(""), LONG))
        if len(found) == 6:
            line.clear()
    assert found == [4, 0, 12, 1, 14, 2]


def test_slow_ones_go_on_one_at_a_time(process: CompileProcess, tmp_path: Path) -> None:
    slow = slow_ones(process, tmp_path / "go", 4)
    wait_until(lambda: process._life is not None and statuses(worker_of(process)).count(psutil.STATUS_STOPPED) == 3)
    assert len(worker_of(process).children()) == 4
    (tmp_path / "go").touch()
    for future in slow:
        assert future.result(60)


@pytest.mark.parametrize(("used", "charged"), [(0.0, 0.25), (0.1, 0.25), (0.7, 0.7), (1.9, 1.0)])
def test_a_copy_is_charged_little_for_the_time_in_which_no_processor_is_free(
    monkeypatch: pytest.MonkeyPatch, used: float, charged: float
) -> None:
    """Else what is quick alone would be slow beside many."""
    work = _Work(0, spec(""), LONG)
    work.ran, work.since = 2.0, (100.0, 5.0)
    monkeypatch.setattr(turns, "_processor_seconds", lambda pid: 5.0 + used)
    assert work.ran_until(101.0) == pytest.approx(2.0 + charged)


def test_the_processor_time_of_a_process_is_its_own() -> None:
    before = time.process_time()
    found = _processor_seconds(os.getpid())
    assert before <= found <= time.process_time()


def test_slow_ones_end_by_the_time_that_they_ran_themselves(process: CompileProcess, tmp_path: Path) -> None:
    """All wait together for longer than any may run."""
    seconds = 0.3
    slow = [process.build(spec(f"until {tmp_path / 'never'} {i}"), seconds) for i in range(4)]
    late = process.build(spec(f"until {tmp_path / 'go'}"), 2 * seconds)
    process.build(spec("quick"), LONG).result(60)
    (tmp_path / "go").touch()
    for future in slow:
        with pytest.raises(GrammarError, match="longer than the 0.3 s that VLLM_GRAMMAR_COMPILE_TIMEOUT_S allows"):
            future.result(60)
    assert late.result(60)


def test_those_that_nobody_waits_for_end_whether_they_run_or_not(process: CompileProcess, tmp_path: Path) -> None:
    slow = slow_ones(process, tmp_path / "go", 30)
    process.build(spec("quick"), LONG).result(60)
    worker = worker_of(process)
    for i in (0, 1, 20, 29):  # that runs; is stopped; has no copy
        assert slow[i].cancel()
    process.build(spec("quick"), LONG).result(60)
    assert not any(future.done() for i, future in enumerate(slow) if i not in (0, 1, 20, 29))
    kept = slow[5]
    for future in slow:
        if future is not kept:
            future.cancel()
    wait_until(lambda: len(worker.children()) == 1)
    (tmp_path / "go").touch()
    assert kept.result(60)
    assert not worker.children()
    assert process._life is not None
    wait_until(lambda: process._life is not None and not process._life.asked)


def test_closing_leaves_no_copy(tmp_path: Path) -> None:
    process = make()
    slow = slow_ones(process, tmp_path / "go", 10)
    worker = worker_of(process)
    wait_until(lambda: statuses(worker).count(psutil.STATUS_STOPPED) == 9)
    family = [worker, *worker.children()]
    assert len(family) == 11
    process.close()
    assert not psutil.wait_procs(family, 60)[1]
    for future in slow:
        with pytest.raises(GrammarError, match="the process that compiles for slow was lost"):
            future.result(60)
    with pytest.raises(GrammarError, match="shutting down"):
        process.build(spec("quick"), LONG)


def test_a_copy_that_crashes_harms_no_other(process: CompileProcess, tmp_path: Path) -> None:
    slow = slow_ones(process, tmp_path / "go", 5)
    process.build(spec("quick"), LONG).result(60)
    worker = worker_of(process)
    wait_until(lambda: psutil.STATUS_STOPPED in statuses(worker))
    stopped = next(copy for copy in worker.children() if copy.status() == psutil.STATUS_STOPPED)
    crashing = [process.build(spec(text), LONG) for text in ("crash", "late-crash")]
    with pytest.raises(GrammarError, match="crashed"):
        crashing[0].result(60)
    stopped.kill()
    wait_until(lambda: any(future.done() for future in slow))
    assert [type(future.exception()) for future in slow if future.done()] == [GrammarError]
    (tmp_path / "go").touch()
    assert sum(future.exception(60) is None for future in slow) == 4
    with pytest.raises(GrammarError, match="crashed"):
        crashing[1].result(60)
    assert worker.is_running() and not worker.children()


def test_a_process_that_dies_fails_what_is_under_way_and_starts_again(process: CompileProcess, tmp_path: Path) -> None:
    slow = slow_ones(process, tmp_path / "go", 5)
    process.build(spec("quick"), LONG).result(60)
    worker = worker_of(process)
    family = [worker, *worker.children()]
    deadly = process.build(spec("parent"), LONG)
    for future in [*slow, deadly]:
        with pytest.raises(GrammarError, match="the process that compiles for slow was lost"):
            future.result(60)
    assert not psutil.wait_procs(family, 60)[1]
    assert process.build(spec("again"), LONG).result(60) == b"again"
    assert worker_of(process).pid != worker.pid


def test_a_process_that_does_nothing_is_ended(process: CompileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.structured_output.worker.MARGIN_SECONDS", 0.3)
    process.make_run()
    worker = worker_of(process)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(GrammarError, match="was lost"):
        process.build(spec("quick"), 0.1).result(60)
    assert not worker.is_running()
    assert process.build(spec("again"), LONG).result(60) == b"again"


PARENT = """
import time
from tests.structured_output.test_worker import make, slow_ones, statuses, wait_until, worker_of
from pathlib import Path
process = make()
slow = slow_ones(process, Path("/nowhere/go"), 5)
worker = worker_of(process)
wait_until(lambda: len(found := statuses(worker)) == 5 and found.count("stopped") == 4)
print(worker.pid, *[copy.pid for copy in worker.children()], flush=True)
time.sleep(600)
"""


def test_nothing_outlives_the_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        family = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(family) == 6
    assert not psutil.wait_procs(family, 60)[1]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("large", None),
        ("refuse", "not this one"),
        ("crash", "crashed"),
        ("hang", "longer than the 0.2 s that VLLM_GRAMMAR_COMPILE_TIMEOUT_S allows"),
        ("grow", "more than 4 GiB of memory"),
        ("nest", "nested too deeply"),
    ],
)
def test_what_becomes_of_a_copy_is_told_and_nothing_of_it_is_left(
    process: CompileProcess, text: str, error: str | None
) -> None:
    built = process.build(spec(text), 0.2 if text == "hang" else 30.0)
    if error is None:
        assert built.result(60) == b"x" * 5_000_000
    else:
        with pytest.raises(GrammarError, match=error):
            built.result(60)
    assert not worker_of(process).children()
