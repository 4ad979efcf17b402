"""Compiling in the background: once for equal constraints, within a deadline and a memory, whatever is asked for."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

import vllm
from tests.structured_output.driver import spec_of
from vllm.engine.tokenizer_files import load_tokenizer
from vllm.structured_output.backends.guidance import Guidance
from vllm.structured_output.compiler import Compiled, GrammarCache, GrammarCompiler
from vllm.structured_output.grammar import GrammarError
from vllm.structured_output.spec import GrammarSpec
from vllm.structured_output.vocabulary import Vocabulary, vocabulary_of
from vllm.structured_output.worker import CompileProcess

DEMO = Path(vllm.__file__).parent / "assets" / "demo"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(load_tokenizer(DEMO), 4096)


@pytest.fixture
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: vocabulary, seconds=3.0)
    yield made
    made.close()


def process_of(compiler: GrammarCompiler, backend: str) -> subprocess.Popen[bytes] | None:
    helper = compiler._processes[backend]._helper
    return None if helper is None else helper._process


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def entry(nbytes: int) -> Compiled:
    return Compiled(Sized(nbytes), None)  # type: ignore[arg-type]


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text, "guidance")


def test_the_cache_keeps_what_was_used_last() -> None:
    cache = GrammarCache(1000)
    for name in "abcd":
        cache.put(spec(name), entry(300 - 1))
        cache.get(spec("a"))
    assert [name for name in "abcd" if cache.get(spec(name))] == ["a", "c", "d"]
    assert cache.nbytes == 900
    cache.put(spec("a"), entry(99))
    assert cache.nbytes == 700
    cache.put(spec("huge"), entry(2000))
    assert cache.get(spec("huge")) is None and len(cache) == 3


def test_the_cache_never_holds_more_than_its_limit() -> None:
    cache = GrammarCache(10_000)
    for i in range(2000):
        cache.put(spec(str(i)), entry(1 + i * 37 % 4000))
        assert cache.nbytes <= 10_000
        assert cache.nbytes == sum(size for _, size in cache._found.values())


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[GrammarSpec] = []
    begin = threading.Event()
    compiled = compiler._compiled

    def slow(item: GrammarSpec, data: bytes) -> Compiled:
        begin.wait(10)
        calls.append(item)
        return compiled(item, data)

    monkeypatch.setattr(compiler, "_compiled", slow)
    futures = [compiler.compile(spec("[ab]+")) for _ in range(5)]
    begin.set()
    assert len({id(future.result().grammar) for future in futures}) == 1
    assert len(calls) == 1
    assert compiler.compile(spec("[ab]+")).result().grammar is futures[0].result().grammar
    assert len(calls) == 1


def test_what_failed_is_tried_again(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiler._compiled

    def fail(item: GrammarSpec, data: bytes) -> Compiled:
        raise MemoryError("no memory")

    monkeypatch.setattr(compiler, "_compiled", fail)
    with pytest.raises(GrammarError, match="MemoryError: no memory"):
        compiler.compile(spec("a+")).result()
    monkeypatch.setattr(compiler, "_compiled", compiled)
    assert compiler.compile(spec("a+")).result().grammar


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_a_compilation_that_takes_too_long_is_ended(compiler: GrammarCompiler, backend: str) -> None:
    """Alone: the process goes on without having to start again, and other back ends do meanwhile."""
    compiler.compile(spec_of(backend, regex="a")).result()
    process = process_of(compiler, backend)
    slow: Future[Any] = compiler.compile(spec_of(backend, regex="(x{0,1000}y){0,1000}"))
    others = [compiler.compile(spec_of(backend, regex=f"{mark}(x{{0,1000}}y){{0,1000}}")) for mark in "abc"]
    assert compiler.compile(spec("[0-9]+")).result().grammar
    assert not any(other.done() for other in others)
    for mark, other in zip("bc", others[1:], strict=True):
        compiler.give_up(spec_of(backend, regex=f"{mark}(x{{0,1000}}y){{0,1000}}"))
        assert other.cancelled()
    with pytest.raises(GrammarError, match="longer than the 3 s|crashed"):
        slow.result()
    assert compiler.compile(spec_of(backend, regex="ab?")).result().grammar
    assert process_of(compiler, backend) is process


def test_patterns_put_together_for_ever_are_ended(compiler: GrammarCompiler) -> None:
    """guidance has limits of its own, which do not count what allOf of patterns takes."""
    patterns = [{"type": "string", "pattern": f"[a-z]{{{i},{i + 40}}}"} for i in range(1, 40)]
    with pytest.raises(GrammarError, match="longer than the 3 s"):
        compiler.compile(spec_of("guidance", json={"allOf": patterns})).result()
    assert compiler.compile(spec_of("guidance", json={"allOf": patterns[:2]})).result().grammar


def test_loading_is_not_charged_for_time_in_which_no_processor_is_free(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Guidance.load
    monkeypatch.setattr(Guidance, "load", lambda *arguments: time.sleep(0.3) or load(*arguments))
    monkeypatch.setattr(compiler, "_seconds", 0.2)
    assert compiler._compiled(spec("[ab]{3}"), b"").grammar


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf"])
def test_the_deadline_must_be_a_number_of_seconds(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("VLLM_GRAMMAR_COMPILE_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="VLLM_GRAMMAR_COMPILE_TIMEOUT_S must be a number of seconds above 0"):
        GrammarCompiler(lambda: vocabulary)


def test_a_process_that_dies_fails_the_compilation_alone(compiler: GrammarCompiler) -> None:
    compiler.compile(spec_of("outlines", regex="a")).result()
    process = process_of(compiler, "outlines")
    assert process is not None
    os.kill(process.pid, 9)
    process.wait()
    assert compiler.compile(spec_of("outlines", regex="abc")).result().grammar


def test_the_process_of_a_chosen_back_end_starts_before_the_first_request(compiler: GrammarCompiler) -> None:
    compiler.warm("outlines").result()
    process = process_of(compiler, "outlines")
    assert process is not None and process.poll() is None
    assert compiler.compile(spec_of("outlines", regex="abc")).result().grammar
    assert process_of(compiler, "outlines") is process
    with pytest.raises(Exception, match="nobody"):
        compiler.warm("nobody").result()


def test_closing_ends_the_processes(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.compile(spec_of("outlines", regex="a")).result()
    process = process_of(compiler, "outlines")
    assert process is not None and process.poll() is None
    compiler.close()
    assert process.poll() is not None


def test_quick_grammars_overtake_slow_ones_that_end_when_nobody_waits(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    process = CompileProcess("slow", vocabulary, "tests.structured_output.slow_library")
    compiler._processes["slow"] = process
    compiler._backends["slow"] = None  # type: ignore[assignment]
    monkeypatch.setattr(compiler, "_compiled", lambda item, data: Compiled(Sized(len(data)), None))
    monkeypatch.setattr(compiler, "_seconds", 300.0)
    specs = [GrammarSpec("regex", f"until {tmp_path / 'go'} {i}", "slow") for i in range(40)]
    slow = [compiler.compile(item) for item in specs]
    assert compiler.compile(GrammarSpec("regex", "quick", "slow")).result(60).grammar.nbytes == len("quick")
    assert not any(future.done() for future in slow)
    for item in specs[1:]:
        compiler.give_up(item)
    assert all(future.cancelled() for future in slow[1:])
    popen = process_of(compiler, "slow")
    assert popen is not None
    family = psutil.Process(popen.pid)
    for _ in range(2000):
        if len(family.children()) == 1:
            break
        time.sleep(5e-3)
    again = compiler.compile(specs[1])
    assert not slow[0].done() and again is not slow[1]
    (tmp_path / "go").touch()
    assert slow[0].result(60) and again.result(60)
    assert not family.children()
    left = compiler.compile(GrammarSpec("regex", "hang", "slow"))
    compiler.close()
    assert left.cancelled() and not family.is_running()


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a+)+$"},
    {"regex": "(a|a)*b"},
    {"regex": ".{0,60000}"},
    {"regex": "x{1000}{1000}"},
    {"regex": "(" * 120 + "a" + ")*" * 120},
    {"regex": "[" + "\\x00-\\U0010FFFF" * 500 + "]{1,999}"},
    {"regex": "|".join(f"{'a' * (i % 50)}b{i}" for i in range(3000))},
    {"grammar": 'start: a\na: a a | "x" a | a "y"'},
    {"grammar": "start: " + "(" * 100 + '"a"' + ")*" * 100},
    {"grammar": "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(300)) + '\nr300: "a"\nstart: r0'},
    {"grammar": 'root ::= root root | "a"'},
    {"grammar": 'root ::= ("a"*)*'},
    {"json": {"enum": [f"value {i}" for i in range(5000)]}},
    {"json": {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(2000)}}},
    {"json": {"type": "array", "items": {"type": "array", "maxItems": 10**6}, "minItems": 10**5}},
    {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
    {"json": {"type": "integer", "minimum": -(10**30), "maximum": 10**30, "multipleOf": 7919}},
    {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
    {"json": {"allOf": [{"properties": {f"k{i}": {"pattern": f"^(a|b){{{i}}}$"}}} for i in range(60)]}},
    {"json": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"const": i}}} for i in range(2000)]}},
    {"choice": ["x" * 60 + str(i) for i in range(4000)]},
    {"json": {"type": "string", "pattern": "(?i)" + "[\u0130-\uffff]" * 400}},
    {"json": {"allOf": [{"type": "string", "pattern": f"[a-z]{{{i},{i + 40}}}"} for i in range(1, 40)]}},
    {"grammar": "start: T\nT: " + " & ".join(f"/(.*[ab]){{{i}}}.*/" for i in range(10, 40))},
    {"grammar": "\n".join(f"r{i} ::= r{i + 1}?" for i in range(3000)) + '\nr3000 ::= "a"\nroot ::= r0'},
    {
        "structural_tag": json.dumps(
            {
                "structures": [{"begin": f"z{i}", "schema": {}, "end": ""} for i in range(1500)],
                "triggers": ["b"] * 30_000 + ["z"],
            }
        )
    },
]


@pytest.mark.parametrize("constraint", HOSTILE, ids=lambda c: str(c)[:50])
def test_hostile_constraints_are_compiled_in_time_or_refused(vocabulary: Vocabulary, constraint: Any) -> None:
    """With the library that is used where nobody asks for another."""
    compiler = GrammarCompiler(lambda: vocabulary)
    try:
        item = spec_of("guidance", **constraint)
        try:
            compiler.compile(item).result(60)
        except GrammarError as error:
            assert str(error)
    except ValueError as error:
        assert str(error)
    finally:
        compiler.close()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_is_bounded_over_many_schemas(vocabulary: Vocabulary) -> None:
    """T31, rows 12 and 13 of the advisories: 5,000 schemas that differ."""
    limit = 32 << 20
    compiler = GrammarCompiler(lambda: vocabulary, cache_bytes=limit)
    process = psutil.Process()
    before = 0

    def schema(i: int) -> dict[str, Any]:
        names = {f"key_{i}_{k}": {"type": "string", "enum": [f"v{i}_{j}" for j in range(40)]} for k in range(20)}
        return {"type": "object", "properties": names}

    for i in range(5000):
        compiler.compile(spec_of("guidance", json=schema(i))).result()
        if i == 1000:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()
    growth = process.memory_info().rss - before
    print(
        f"T31: 4,000 more schemas: RSS grew by {growth / 2**20:.1f} MiB; cache {compiler.cache.nbytes / 2**20:.1f} MiB"
    )
    assert compiler.cache.nbytes <= limit
    assert growth < 128 << 20
    compiler.close()
