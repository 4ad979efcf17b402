"""A process that answers questions: whole answers, deadlines, deaths, and its end with whoever asks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from vllm.ipc.helper import Helper

MODULE = "tests.ipc.answering"


@pytest.fixture
def helper() -> Iterator[Helper]:
    made = Helper(MODULE)
    yield made
    made.end()
    assert not made.is_running


def test_answers_come_whole_and_nothing_else_comes(helper: Helper, capfd: pytest.CaptureFixture[str]) -> None:
    assert helper.start(b"hello", 60) == b"hello"
    for size in (0, 1, 100_000, 3_000_000):
        question = os.urandom(size)
        assert helper.ask(question, 60) == question
    assert not capfd.readouterr().out


def test_an_answer_that_takes_too_long_is_a_timeout(helper: Helper) -> None:
    helper.start(b"hello", 60)
    with pytest.raises(TimeoutError):
        helper.ask(b"sleep 60", 0.2)
    assert helper.start(b"again", 60) == b"again"  # another process: the late answer is nobody's


def test_a_death_is_the_end_of_the_answers(helper: Helper) -> None:
    with pytest.raises(EOFError):
        helper.ask(b"before it was started", 1)
    helper.start(b"hello", 60)
    with pytest.raises(EOFError):
        helper.ask(b"die 3", 60)
    with pytest.raises(EOFError):
        helper.ask(b"x", 60)
    helper.end()
    assert helper.start(b"again", 60) == b"again"


def test_killing_it_from_another_thread_ends_the_question(helper: Helper) -> None:
    helper.start(b"hello", 60)
    threading.Timer(0.2, helper.kill).start()
    started = time.monotonic()
    with pytest.raises(EOFError):
        helper.ask(b"sleep 60", 60)
    assert time.monotonic() - started < 50


def test_it_outlives_the_thread_that_started_it(helper: Helper) -> None:
    thread = threading.Thread(target=helper.start, args=(b"hello", 60))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert helper.ask(b"still there", 60) == b"still there"


def test_variables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    for environment, value in ((None, b"x"), ({"PATH": os.environ["PATH"]}, b"")):
        helper = Helper(MODULE, environment)
        assert helper.start(b"variable A_SECRET", 60) == value
        helper.end()
