"""While answers are in progress, a step gets as many tokens as measured steps say take no longer than the limit."""

import pytest

from vllm.core.pace import Pace


def run(pace: Pace, per_token: float, steps: int, answers: int, prompts: int) -> list[int]:
    """Tokens of steps with so many answers and tokens of prompts waiting, where each token takes so many seconds."""
    found, now = [], 0.0
    for _ in range(steps):
        tokens = min(pace.budget(), answers + prompts)
        rows = [1] * answers + ([tokens - answers] if tokens > answers else [])
        pace.planned(rows)
        now += per_token * tokens
        pace.took(now - per_token * tokens, now, rows)
        found.append(tokens)
    return found


def test_steps_come_to_the_limit_and_stay_there() -> None:
    found = run(Pace(0.1, 8192), 25e-6, 12, 40, 100_000)
    assert found[0] == 8192  # nobody answers yet
    assert all(abs(n * 25e-6 - 0.1) < 0.002 for n in found[1:])


def test_the_first_step_beside_answers_is_small_since_nothing_is_known() -> None:
    pace = Pace(0.1, 8192)
    pace.planned([1] * 40)
    found = run(pace, 25e-6, 3, 40, 100_000)
    assert found[0] == 40 + 512
    assert all(abs(n * 25e-6 - 0.1) < 0.002 for n in found[1:])


def test_without_a_limit_or_without_answers_steps_are_full() -> None:
    assert set(run(Pace(0.0, 8192), 1e-3, 6, 40, 100_000)) == {8192}
    assert set(run(Pace(0.1, 8192), 1e-3, 6, 0, 100_000)) == {8192}


def test_prompts_go_on_however_slow_steps_are() -> None:
    assert run(Pace(0.001, 8192), 1e-3, 6, 300, 100_000)[1:] == [812] * 5


def test_a_faster_device_gets_more_again() -> None:
    pace = Pace(0.1, 8192)
    run(pace, 100e-6, 10, 4, 100_000)
    assert run(pace, 20e-6, 30, 4, 100_000)[-1] > 4500


def test_a_step_in_flight_behind_another_is_not_counted_twice() -> None:
    pace = Pace(0.1, 100_000)
    pace.planned([1, 2000])
    pace.took(0.0, 0.05, [1999, 1])
    pace.took(0.01, 0.10, [1999, 1])  # planned while the first one ran
    assert pace.budget() == pytest.approx(4000, abs=2)
