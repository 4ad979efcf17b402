"""What hostile schemas, patterns, grammars and tools take from others: `python -m benchmarks.grammar_attacks`.

The constraints of the tests are put to a server of the demo model, once for each back end, and tools with such schemas;
then long texts of ambiguous grammars, and schemas that all differ. Beside them another client reads streams of 64
tokens and a third asks for /health. Shown are how many were refused, how long the slowest took that was answered, the
longest time in which the reader got nothing, the slowest /health, and the memory of all of the server's processes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.attacks import AMBIGUOUS, CHAT, COMPLETIONS, MEGABYTE, USER, Bystanders, post, serving, tool
from tests.structured_output.test_compiler import HOSTILE
from vllm.structured_output.support import BACKENDS

AT_ONCE = 8


def constraints(backend: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, route and body of each."""
    for constraint in HOSTILE:
        guided = {f"guided_{kind}": value for kind, value in constraint.items()}
        body = {"prompt": "a", "max_tokens": 4, "guided_decoding_backend": f"{backend}:no-fallback", **guided}
        yield str(constraint)[:60], COMPLETIONS, body


def tools() -> Iterator[tuple[str, str, dict[str, Any]]]:
    common = {"messages": [USER], "max_tokens": 4}
    for constraint in HOSTILE:
        if "json" in constraint and constraint["json"].get("type", "object") == "object":
            hostile = [tool("f", "", constraint["json"])]
            for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
                yield f"tools {choice} {constraint}"[:60], CHAT, {**common, "tools": hostile, "tool_choice": choice}
    many = [tool(f"f{i}", "", {"type": "object", "properties": {"a": {"type": "string"}}}) for i in range(500)]
    yield "500 tools", CHAT, {**common, "tools": many, "tool_choice": "required"}


def schema(i: int) -> dict[str, Any]:
    """One of many that all differ."""
    names = {f"key_{i}_{k}": {"type": "string", "enum": [f"v{i}_{j}" for j in range(40)]} for k in range(20)}
    return {"type": "object", "properties": names}


def megabytes(pid: int) -> float:
    """Memory of a process and of all that it has started."""
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) / MEGABYTE


def put(
    port: int, watched: Bystanders, asked: Iterator[tuple[str, str, dict[str, Any]]]
) -> tuple[Counter[int], list[tuple[float, int, str]], float, float]:
    """Put one after the other. Returns the answers' counts, (seconds, status, name) of each, and what others felt."""
    begun, statuses, taken = time.monotonic(), Counter[int](), []
    for name, path, body in asked:
        data, before = json.dumps(body).encode(), time.monotonic()
        status, answer = post(port, path, data)
        statuses[status] += 1
        if status >= 500:
            print(f"{status} for {name}: {answer[:300]!r}", flush=True)
        taken.append((time.monotonic() - before, status, name))
    time.sleep(0.05)
    return statuses, sorted(taken, reverse=True), *watched.worst_since(begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=5000, help="that differ")
    parser.add_argument("--only", nargs="+", default=[*BACKENDS, "tools", "texts", "schemas"], help="some of these")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with serving("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as (port, pid):
        watched = Bystanders(port, "demo")
        time.sleep(2.0)
        print("others alone: gap {:.0f} ms, /health {:.0f} ms".format(*(1e3 * s for s in watched.worst_since(0.0))))
        texts = ((attack.name, attack.path, attack.body()) for attack in AMBIGUOUS)
        for name, asked in [*((b, constraints(b)) for b in BACKENDS), ("tools", tools()), ("texts", texts)]:
            if name not in args.only:
                continue
            if name in BACKENDS:  # its library is loaded when it is first asked for
                body = {"prompt": "a", "max_tokens": 4, "guided_decoding_backend": name, "guided_regex": "a"}
                post(port, COMPLETIONS, json.dumps(body).encode())
            statuses, taken, gap, health = put(port, watched, asked)
            slowest = next(((s, what) for s, status, what in taken if status == 200), (0.0, ""))
            print(
                f"{name}: answers {dict(statuses)}, slowest answered {slowest[0]:.2f} s, slowest refused "
                f"{max((s for s, status, _ in taken if status == 400), default=0.0):.2f} s, gap {1e3 * gap:.0f} ms, "
                f"/health {1e3 * health:.0f} ms",
                flush=True,
            )
            found[name] = {"answers": statuses, "slowest": taken[:5], "gap": gap, "health": health}
        begun, memory = time.monotonic(), {}

        def ask(i: int) -> int:
            return post(
                port, COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 2, "guided_json": schema(i)}).encode()
            )[0]

        counts: Counter[int] = Counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for start in range(0, args.schemas if "schemas" in args.only else 0, args.schemas // 5):
                counts.update(pool.map(ask, range(start, start + args.schemas // 5)))
                memory[start + args.schemas // 5] = megabytes(pid)
        gap, health = watched.worst_since(begun)
        watched.end()
    print(
        f"{args.schemas} schemas: answers {dict(counts)} in {time.monotonic() - begun:.0f} s, gap {1e3 * gap:.0f} ms, "
        f"/health {1e3 * health:.0f} ms, memory {', '.join(f'{n}: {m:.0f} MB' for n, m in memory.items())}"
    )
    for text in watched.wrong[:5]:
        print("wrong:", text)
    found["schemas"] = {"answers": counts, "gap": gap, "health": health, "memory": memory, "wrong": watched.wrong}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
