r"""Two source trees in turns (old, new, new, old, ...): the core without a model, the demo model, its server, and on a
GPU the captured decode steps and prompts of the two benchmark shapes.

    git archive COMMIT | tar -x -C OLD          # and python tools/build_native.py there, on the CPU
    sed -i 's/^\(HOLD_SECONDS\|LONG_STEP_SECONDS\) = .*/\1 = 0.0/' OLD/vllm/engine/core_process.py  # for `stream`
    python benchmarks/ab.py --old OLD --new . --pairs 12 --json benchmarks/results/ab_cpu.json
    python benchmarks/ab.py --old OLD --new . --cases gpu --models /tmp/models --json benchmarks/results/ab_h200.json

Each tree runs in a process of its own, computes one case when it is its turn, and is idle else. On the CPU processor
time counts, of one thread, on a GPU and for servers the clock. Shown: the median of the ratios new / old of
neighbouring turns, with the interval that holds it at 95 % (of the sign test), so that what others do to the machine
meets both. `within`: the whole interval is below the limit.

Two processes of one tree can differ by a tenth, for as long as they live and are on one GPU together (prompts do): with
`--rounds` of 6 or more each tree gets a process of its own in each round, one after the other and alone, the other tree
first every second time, and the interval is that of the rounds' medians.

`server` asks for whole answers, `stream` for one event a token: a tree of before 0.9.2+py3 holds tokens back for 6 ms
and sends a tenth of the events, unless the line above has been run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

CPU = ("core", "decode", "prefill", "server", "stream")
SHAPES = ("qwen3-0.6b", "llama-3.1-8b")
GPU = tuple(f"{case} {shape}" for shape in SHAPES for case in ("decode", "prefill", "tokens"))
# what the ratio may be, at most
LIMITS = {"core": 1.02, "decode": 1.02, "prefill": 1.02, "server": 1.03, "stream": 1.03}
CAPTURED_DECODE = 1.01
_REPEATS = 6  # in a turn on the CPU, of which the fastest counts: others share its caches
_PROMPTS = 3  # in a turn on a GPU: a tenth of their time is the host's
ROUNDS = 6  # so many medians have an interval


# -- one tree's side ---------------------------------------------------------------------------------------------------


def core() -> float:
    """Planning and taking in a step of 64 requests that decode, per step."""
    from vllm.core.kv_spec import KVGroup, KVKind, KVLayout
    from vllm.core.plan import StepResult
    from vllm.core.scheduler import Scheduler, SchedulerLimits
    from vllm.engine.messages import CoreRequest
    from vllm.sampling_params import SamplingParams

    make: Any = getattr(KVLayout, "alike", KVLayout)
    layout = make((KVGroup(KVKind.FULL, (0,)),), 16, 1, 64, 2)
    scheduler = Scheduler(SchedulerLimits(64, 8192, 2048), getattr(layout, "policy", layout), 64 * 64 + 200)
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    for i in range(64):
        scheduler.add(CoreRequest(str(i), [(i * 7 + j) % 997 for j in range(1 + i % 16)], params, seed=i))
    begin, steps = 0.0, 400
    for step in range(steps + 50):
        if step == 50:
            begin = time.process_time()
        plan: Any = scheduler.schedule()
        scheduler.apply(StepResult(plan.step_id, [5 if sampled else -1 for sampled in plan.sample.tolist()]))
    return (time.process_time() - begin) / steps


class Model:
    """An engine, and the time that it takes for prompts of random tokens."""

    def __init__(self, folder: str, clock: Callable[[], float], **options: Any) -> None:
        from vllm import LLM, SamplingParams

        self._params, self._clock, self._random = SamplingParams, clock, random.Random(0)
        self._llm = LLM(folder, **options)

    def seconds(self, count: int, length: int, out: int) -> float:
        """The time of `count` prompts of `length` tokens with `out` tokens behind each, which nobody has cached."""
        params = self._params(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
        prompts: list[Any] = [
            {"prompt_token_ids": [self._random.randrange(10, 250) for _ in range(length)]} for _ in range(count)
        ]
        begin = self._clock()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = self._clock() - begin
        if {len(o.outputs[0].token_ids) for o in outputs} != {out}:
            raise RuntimeError("An output is of another length than was asked for.")
        return seconds

    def tokens(self) -> list[list[int]]:
        """Greedy, seeded and cut samples behind prompts of several lengths, in one batch."""
        numbers = random.Random(1)
        lengths = [1, 5, 17, 64, 200, 700, 1500, 33] * 3
        prompts: list[Any] = [{"prompt_token_ids": [numbers.randrange(10, 250) for _ in range(n)]} for n in lengths]
        params = [
            self._params(max_tokens=48, ignore_eos=True, detokenize=False, **settings)
            for settings in (
                {"temperature": 0.0},
                {"temperature": 0.9, "seed": 7},
                {"top_p": 0.9, "top_k": 40, "seed": 11},
            )
            for _ in range(len(lengths) // 3)
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Server:
    """The demo model behind HTTP, asked by eight clients at once."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "demo"]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self._port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 180
        while not self._healthy():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("The server does not start.")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _client(self, requests: int, stream: bool) -> int:
        """How many events came."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        events = 0
        for i in range(requests):
            body = {
                "model": "demo",
                "prompt": "The server says",
                "max_tokens": 48,
                "ignore_eos": True,
                "stream": stream,
            }
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps({**body, "seed": i}), headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200 or answer.rstrip().endswith(b"data: [DONE]") != stream:
                raise RuntimeError(f"The server answers with {response.status}.")
            events += answer.count(b"data: ")
        connection.close()
        return events

    def seconds(self, stream: bool) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(8) as clients:
            events = sum(clients.map(lambda _: self._client(6, stream), range(8)))
        seconds = time.perf_counter() - begin
        if stream and events < 12 * 48:  # of 48 tokens, which share an event while their reader is behind
            raise RuntimeError("The server holds tokens back; see the head of this file.")
        return seconds

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


class Side:
    """Measures cases by name; what a case needs is made when it is asked for first."""

    def __init__(self, models: Path | None) -> None:
        self._models = models
        self._demo: Model | None = None
        self._server: Server | None = None
        self._model: Model | None = None  # of the one shape that a process is asked for

    def measure(self, case: str) -> Any:
        name, _, shape = case.partition(" ")
        if shape:
            return self._shape(name, shape)
        if name == "core":
            return min(core() for _ in range(_REPEATS))
        if name in ("server", "stream"):
            self._server = self._server or Server()
            return self._server.seconds(name == "stream")
        if self._demo is None:
            self._demo = Model("demo", time.process_time, max_num_seqs=16)
        if name == "decode":
            return min(self._demo.seconds(8, 8, 96) for _ in range(_REPEATS))
        return min(sum(self._demo.seconds(1, 400, 1) for _ in range(4)) for _ in range(_REPEATS))

    def _shape(self, name: str, shape: str) -> Any:
        # tokens in fp32, where no two kernels round a choice apart
        dtype = "float32" if name == "tokens" else "bfloat16"
        if self._model is None:
            if self._models is None:
                raise RuntimeError("Cases on a GPU need --models, the folder that benchmarks.h200.models has made.")
            self._model = Model(
                str(self._models / shape), time.perf_counter, load_format="dummy", skip_tokenizer_init=True,
                dtype=dtype, max_model_len=4096, gpu_memory_utilization=0.4,
            )  # fmt: skip
        model = self._model
        if name == "decode":
            return model.seconds(32, 16, 600)
        return model.tokens() if name == "tokens" else min(model.seconds(8, 2048, 1) for _ in range(_PROMPTS))

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


def serve(models: Path | None) -> None:
    """Answer each case's name with its time."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    side = Side(models)
    try:
        for line in sys.stdin:
            print(json.dumps(side.measure(line.strip())), file=out, flush=True)
    finally:
        side.stop()


# -- both --------------------------------------------------------------------------------------------------------------


def interval(ratios: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 %, by the order of the values alone."""
    n, ordered, k = len(ratios), sorted(ratios), 0
    while sum(math.comb(n, i) for i in range(k + 1)) / 2**n < 0.025:
        k += 1
    return ordered[max(k - 1, 0)], ordered[n - max(k, 1)]


Times = tuple[list[float], list[float]]  # of the old tree and of the new one, by pairs


def row(case: str, rounds: list[Times]) -> dict[str, Any]:
    """What the times of each round say of a case."""
    ratios = [[new / old for old, new in zip(*found, strict=True)] for found in rounds]
    several = [statistics.median(r) for r in ratios] if len(ratios) >= ROUNDS else list(chain(*ratios))
    low, high = interval(several)
    limit = CAPTURED_DECODE if case.startswith("decode ") else LIMITS[case.partition(" ")[0]]
    return {
        "case": case,
        "old_s": float(f"{statistics.median(chain(*(old for old, _ in rounds))):.4g}"),
        "new_s": float(f"{statistics.median(chain(*(new for _, new in rounds))):.4g}"),
        "ratio": round(statistics.median(several), 4),
        "interval": [round(low, 4), round(high, 4)],
        "limit": limit,
        "within": high <= limit,
    }


class Process:
    """One tree, which measures a case when it is asked."""

    def __init__(self, tree: Path, models: Path | None) -> None:
        path = os.pathsep.join(filter(None, [str(tree.resolve()), os.environ.get("PYTHONPATH", "")]))
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        program = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        if models is not None:
            program += ["--models", str(models.resolve())]
        self._tree = tree
        self._child = subprocess.Popen(
            program, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, case: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(case + "\n")
        self._child.stdin.flush()

    def answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"The tree in {self._tree} has failed; what it said is above.")
        return json.loads(line)

    def measure(self, case: str) -> Any:
        self.ask(case)
        return self.answer()

    def end(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def warm_times(case: str) -> int:
    return 5 if " " in case else 2  # graphs are captured when they have been used a few times


def in_turns(sides: list[Process], case: str, pairs: int) -> Times:
    """Two processes, of which one works at a time."""
    for side in sides:  # the first time alone: each looks how much memory is free
        side.measure(case)
    for _ in range(warm_times(case) - 1):
        for side in sides:
            side.ask(case)
        for side in sides:
            side.answer()
    found: Times = ([], [])
    for i in range(pairs):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            found[which].append(sides[which].measure(case))
    return found


def alone(start: Callable[[], Process], case: str, times: int, warm: int) -> list[Any]:
    """What a process with the machine to itself measures, which ends before the next one begins."""
    process = start()
    for _ in range(warm):
        process.measure(case)
    found = [process.measure(case) for _ in range(times)]
    process.end()
    return found


def in_rounds(starts: Sequence[Callable[[], Process]], case: str, rounds: int, pairs: int) -> list[Times]:
    found: list[Times] = []
    for i in range(rounds):
        times: Times = ([], [])
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            times[which].extend(alone(starts[which], case, pairs, warm_times(case)))
        found.append(times)
        old, new = map(statistics.median, times)
        print(f"round {i + 1} of {rounds}: {old:.4g} s, {new:.4g} s, {new / old:.4f}", flush=True)
    return found


def same(starts: Sequence[Callable[[], Process]], case: str) -> dict[str, Any]:
    """How many sequences of tokens are those of the other tree."""
    old, new = (alone(start, case, 1, 0)[0] for start in starts)
    equal = [a == b for a, b in zip(old, new, strict=True)]
    return {"case": case, "sequences": len(equal), "equal": sum(equal), "within": all(equal)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=Path())
    parser.add_argument("--names", nargs=2, default=["old", "new"], help="what the trees are, for the result")
    parser.add_argument("--pairs", type=int, default=12, help="in each round")
    parser.add_argument("--rounds", type=int, default=1, help=f"of processes, {ROUNDS} or more where these differ")
    parser.add_argument("--cases", nargs="+", default=["cpu"], help=f"cpu, gpu, or some of {CPU + GPU}")
    parser.add_argument("--models", type=Path, help="the folder that benchmarks.h200.models has made")
    parser.add_argument("--serve", action="store_true", help="be one tree's side (not for users)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.serve:
        serve(args.models)
        return
    if args.old is None:
        parser.error("--old is missing")
    groups = {"cpu": CPU, "gpu": GPU}
    cases = [case for name in args.cases for case in groups.get(name, (name,))]
    starts = [partial(Process, tree, args.models) for tree in (args.old, args.new)]
    rows = []
    for _, of_shape in groupby(cases, lambda case: case.partition(" ")[2]):
        in_this = list(of_shape)
        timed = [case for case in in_this if not case.startswith("tokens")]
        sides = [start() for start in starts] if timed and args.rounds == 1 else []
        for case in timed:
            times = [in_turns(sides, case, args.pairs)] if sides else in_rounds(starts, case, args.rounds, args.pairs)
            rows.append(row(case, times))
            print(rows[-1], flush=True)
        for side in sides:
            side.end()
        for case in in_this:
            if case not in timed:
                rows.append(same(starts, case))
                print(rows[-1], flush=True)
    if args.json:
        about = {
            "trees": args.names, "rounds": args.rounds, "pairs": args.pairs, "python": sys.version.split()[0],
            "cores": os.cpu_count(), "load": [round(x, 2) for x in os.getloadavg()],
        }  # fmt: skip
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
