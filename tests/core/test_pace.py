"""While answers are in progress, a step gets as many tokens as measured steps say take no longer than the limit."""

from vllm.core.pace import Pace


def run(pace: Pace, per_token: float, steps: int, answers: int, prompts: int) -> list[int]:
    """Tokens of steps with so many answers and tokens of prompts waiting, where each token takes so many seconds."""
    found, now = [], 0.0
    pace.came(1000)
    for _ in range(steps):
        tokens = min(pace.budget(prompts // 1000), answers + prompts)
        rows = [1] * answers + ([tokens - answers] if tokens > answers else [])
        pace.planned(rows, 0)
        now += per_token * tokens
        pace.took(now - per_token * tokens, now, rows)
        found.append(tokens)
    return found


def test_steps_come_to_the_limit_and_stay_there() -> None:
    found = run(Pace(0.1, 8192), 24e-6, 12, 40, 100_000)
    assert found[0] == 8192  # nobody answers yet
    assert set(found[1:]) == {4096}  # 4166, and of a size that others have too


def test_the_first_step_beside_answers_is_small_since_nothing_is_known() -> None:
    pace = Pace(0.1, 8192)
    pace.planned([1] * 40, 0)
    found = run(pace, 24e-6, 3, 40, 100_000)
    assert found == [320, 4096, 4096]


def test_prompts_that_wait_are_computed_in_a_few_steps_so_that_answers_wait_less() -> None:
    assert run(Pace(0.1, 8192), 40e-6, 4, 32, 8_000) == [8032, 1024, 1024, 1024]
    assert run(Pace(0.1, 8192), 40e-6, 4, 32, 2_000) == [2032, 320, 320, 320]


def test_steps_that_are_short_anyway_take_all_that_waits() -> None:
    assert run(Pace(0.1, 8192), 3e-6, 4, 32, 3_000) == [3032] * 4
    assert run(Pace(0.005, 8192), 3e-6, 4, 32, 3_000)[1:] == [1792] * 3


def test_the_steps_that_wait_for_one_another_do_not_become_smaller() -> None:
    pace = Pace(0.1, 8192)
    pace.came(8000)
    pace.planned([1] * 8, 0)
    pace.took(0.0, 0.05, [1] * 8 + [1000])
    found = []
    left = 8000
    waiting = 1
    while left > 0:
        found.append(pace.budget(waiting))
        waiting, left = 0, left - (found[-1] - 8)
        pace.planned([1] * 8 + [found[-1] - 8], max(left, 0))
    assert found[0] == found[-1] and len(found) == 10
    pace.planned([1] * 8, 0)
    assert pace.budget(0) == 320


def test_without_a_limit_or_without_answers_steps_are_full() -> None:
    assert set(run(Pace(0.0, 8192), 1e-3, 6, 40, 100_000)) == {8192}
    assert set(run(Pace(0.1, 8192), 1e-3, 6, 0, 100_000)) == {8192}


def test_steps_are_short_without_answers_too_while_somebody_is_expected() -> None:
    pace = Pace(0.1, 8192)
    assert pace.budget(100, expects=True) <= 512  # nothing is known
    run(pace, 1e-3, 6, 1, 100_000)
    pace.planned([], 0)
    assert pace.budget(100) == 8192
    assert pace.budget(100, expects=True) <= 320


def test_a_pipeline_takes_large_steps_only_of_very_many_prompts_and_not_to_the_end() -> None:
    assert set(run(Pace(0.0, 8192, stages=2), 1e-3, 6, 40, 100_000)) == {4096}
    pace, waiting, found = Pace(0.0, 8192, stages=2), 0, []
    for _ in range(400):
        pace.came(500)
        waiting += 1
    while waiting:
        found.append(pace.budget(waiting))
        waiting = max(0, waiting - found[-1] // 500)
        pace.planned([500] * (found[-1] // 500), 0)
    assert found[0] == 8192 and found[-1] == 4096 and sorted(found, reverse=True) == found
    assert 4 <= found.count(4096) <= 9
    pace.came(8000)
    assert pace.budget(1) == 4096, "one prompt keeps all stages busy"
    slow = Pace(0.1, 8192, stages=2)
    assert set(run(slow, 24e-6, 12, 40, 100_000)[2:]) == {4096}
    assert set(run(slow, 50e-6, 30, 40, 100_000)[20:]) == {1792}


def test_prompts_go_on_however_slow_steps_are() -> None:
    assert run(Pace(0.001, 8192), 1e-3, 6, 300, 100_000)[1:] == [640] * 5


def test_a_faster_device_gets_more_again() -> None:
    pace = Pace(0.1, 8192)
    run(pace, 100e-6, 10, 4, 100_000)
    assert run(pace, 19e-6, 30, 4, 100_000)[-1] == 5120


def test_a_step_in_flight_behind_another_is_not_counted_twice() -> None:
    pace = Pace(0.1, 100_000)
    pace.came(100_000)
    pace.planned([1, 2000], 0)
    pace.took(0.0, 0.05, [2047, 1])
    pace.took(0.01, 0.10, [2047, 1])  # planned while the first one ran
    assert pace.budget(1) == 4096
