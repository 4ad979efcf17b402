"""Cost of scheduling: microseconds per running request and step, schedule() and apply() together, without a model.

python benchmarks/scheduler.py --json benchmarks/results/scheduler.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from vllm.core.scheduler import Scheduler, SchedulerLimits
from vllm.sampling_params import SamplingParams
from vllm.step.kv_policy import KVGroup, KVKind, KVLayout
from vllm.step.messages import CoreRequest
from vllm.step.result import StepResult


def measure(running: int, steps: int) -> dict[str, float]:
    """Decode `steps` steps with `running` requests; every request grows by a block each 16 steps."""
    layout = KVLayout.alike((KVGroup(KVKind.FULL, (0,)),), 16, 1, 64, 2)
    limits = SchedulerLimits(running, max(8192, running), 2048)
    scheduler = Scheduler(limits, layout.policy, running * 64 + 200)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    for i in range(running):
        scheduler.add(CoreRequest(str(i), [(i * 7 + j) % 997 for j in range(1 + i % 16)], params, seed=i))
    schedule_us, apply_us = [], []
    for step in range(steps + 20):
        t0 = time.perf_counter()
        plan = scheduler.schedule()
        t1 = time.perf_counter()
        assert plan is not None
        result = StepResult(plan.step_id, [5 if s else -1 for s in plan.sample.tolist()])
        t2 = time.perf_counter()
        scheduler.apply(result)
        t3 = time.perf_counter()
        if step >= 20 and len(plan.slots) == running:
            schedule_us.append((t1 - t0) / running * 1e6)
            apply_us.append((t3 - t2) / running * 1e6)
    return {
        "running": running,
        "schedule_us_per_request": round(statistics.median(schedule_us), 3),
        "apply_us_per_request": round(statistics.median(apply_us), 3),
        "total_us_per_request": round(statistics.median(schedule_us) + statistics.median(apply_us), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    rows = [measure(n, 100) for n in (1, 10, 100, 1000)]
    for row in rows:
        print(row)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
