"""What is run before the first request leaves nothing behind."""

import torch

from tests.worker.toy import Driver, Toy
from vllm.worker.rehearsal import LENGTHS, rehearse


def test_requests_find_nothing_of_the_rehearsal() -> None:
    driver = Driver(Toy(), num_slots=2)
    runner = driver.runner
    seen: list[int] = []
    execute = runner.execute
    runner.execute = lambda plan: seen.append(int(plan.num_tokens[0])) or execute(plan)  # type: ignore[func-returns-value]
    rehearse(runner, max_model_len=300)
    runner.execute = execute
    assert seen == [16, 16, 299, 299], "no longer than a request may be"
    assert max(LENGTHS) == 300
    for cache in runner.kv_caches:
        assert not cache[1:].any(), "only the null block was written"
        assert cache[0].any()
    assert not runner.sampler.params.needs.any()
    driver.add("a", [3, 1, 4])
    driver.add("b", list(range(40)), temperature=0.0)
    found = driver.generate(6)
    model = runner.model
    assert found["a"] == model.greedy([3, 1, 4], 6)
    assert found["b"] == model.greedy(list(range(40)), 6)
    assert torch.isfinite(runner.kv_caches[0]).all()
