"""The user guide is true: its programs run, its flags and parameters exist, its links lead somewhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.server.http_server import Server
from tools.environment_page import markdown as environment_page
from tools.server_page import markdown as server_page
from tools.supported_models_page import markdown as supported_models_page
from vllm import SamplingParams
from vllm.benchmarks.offline import make_parser as offline_parser
from vllm.benchmarks.serve import make_parser as bench_parser
from vllm.config.document import markdown as arguments_page
from vllm.entrypoints.cli.client import _parser as client_parser
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.openai.protocol import LATER_FIELDS
from vllm.entrypoints.openai.routes import LATER_ROUTES, OTHER_MODELS_ROUTES
from vllm.entrypoints.openai.run_batch import make_parser as batch_parser
from vllm.reasoning import NAMES
from vllm.tool_parsers.registry import FORMATS
from vllm.utils.argparse import FlexibleArgumentParser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDE = [
    *("README", "installation", "quickstart", "offline", "serving", "cli", "sampling", "cpu", "gpu"),
    *("environment", "troubleshooting", "server_arguments", "metrics", "errors", "tool_calling", "structured_output"),
]


def text_of(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```$", text_of(name), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["quickstart", "offline", "sampling", "structured_output", "pooling"])
def test_the_programs_of_a_page_run_one_after_the_other(name):
    names: dict[str, object] = {}
    out = StringIO()
    with redirect_stdout(out):
        for program in blocks(name, "python"):
            exec(compile(program, f"{name}.md", "exec"), names)
    if name not in ("sampling", "structured_output"):  # which assert
        assert "Paris" in out.getvalue() or "Madrid" in out.getvalue()


def test_what_is_installed_is_this_tree_and_not_what_an_index_has_under_its_name():
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "examples").glob("*.*")]
    for page in pages:
        assert not re.search(r"pip install ['\"]?vllm\b", page.read_text()), page


@pytest.fixture(scope="module")
def demo_server() -> Iterator[Server]:
    with Server(Path("demo"), "--served-model-name", "demo") as running:
        yield running


def test_the_program_that_calls_a_tool(capsys, monkeypatch):
    flags = ("--served-model-name", "demo", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with Server(Path("demo"), *flags) as running:
        (program,) = blocks("tool_calling", "python tools")
        program = program.replace("http://localhost:8000", running.url)
        exec(compile(program, "tool_calling.md", "exec"), {})
    assert capsys.readouterr().out == "get_weather {'city': 'Paris'}\n"


def test_every_parser_has_a_place_in_the_documentation():
    text = text_of("tool_calling")
    for name in (*FORMATS, *NAMES):
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(("name", "expected"), [("quickstart", "Rome"), ("serving", " ")])
def test_the_programs_that_need_a_server_run_against_one(demo_server, capsys, name, expected):
    found = blocks(name, "python server")
    assert found
    for program in found:
        exec(compile(program.replace("http://localhost:8000", demo_server.url), f"{name}.md", "exec"), {})
    assert expected in capsys.readouterr().out


def test_the_requests_of_the_quick_start_are_answered(demo_server):
    found = re.findall(r"curl http://localhost:8000(\S+) -H 'content-type: application/json' -d '(.*?)'$",
                       text_of("quickstart"), re.MULTILINE)  # fmt: skip
    assert len(found) == 2
    for route, body in found:
        answer = demo_server.post(route, body.encode())
        assert answer.status == 200
        assert "Paris" in answer.text or "12" in answer.text


def flags_of(parser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def all_flags() -> set[str]:
    parsers = [make_arg_parser(FlexibleArgumentParser()), bench_parser(), batch_parser(), client_parser("chat")]
    parsers += [offline_parser(kind) for kind in ("latency", "throughput")]
    return {"--config", "--version", "--index-url"}.union(*map(flags_of, parsers))


@pytest.mark.parametrize("name", GUIDE)
def test_every_flag_that_is_named_exists(name):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text_of(name)))
    assert named <= all_flags()


def test_every_sampling_parameter_that_is_named_exists_with_this_default():
    defaults = {name: p.default for name, p in inspect.signature(SamplingParams).parameters.items()}
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", text_of("sampling"), re.MULTILINE)
    assert len(rows) >= 25
    for name, _, default in rows:
        assert name in defaults, name
        if default in ("none", "true", "false", "the same", "`n`"):
            expected = {"true": True, "false": False}.get(default)
            assert defaults[name] is expected, name
        else:
            assert float(default) == defaults[name], name


def test_every_parameter_that_works_is_in_the_page():
    later = {"guided_decoding", "structured_outputs", "extra_args", "output_kind", "output_text_buffer_length"}
    parameters = list(inspect.signature(SamplingParams).parameters)
    until = parameters.index("early_stopping")  # newer names follow, which this version refuses or does not need
    for name in parameters[:until]:
        if not name.startswith("_") and name not in later:
            assert f"`{name}" in text_of("sampling"), name


@pytest.mark.parametrize("name", GUIDE)
def test_links_lead_to_files(name):
    for target in re.findall(r"\]\((?!http)([^)#]+)", text_of(name)):
        assert (DOCS / target).exists(), target


def test_the_page_of_errors_names_all_routes_and_fields_that_are_refused():
    page = text_of("errors")
    assert [name for name in (*LATER_FIELDS, *LATER_ROUTES, *OTHER_MODELS_ROUTES) if f"`{name}`" not in page] == []


def test_every_page_is_in_the_index():
    index = text_of("README")
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_generated_pages_are_up_to_date():
    assert (DOCS / "environment.md").read_text() == environment_page()
    assert (DOCS / "supported_models.md").read_text() == supported_models_page()
    assert (DOCS / "engine_arguments.md").read_text() == arguments_page()
    assert (DOCS / "server_arguments.md").read_text() == server_page()


def test_the_page_of_metrics_has_all_names_and_no_others(demo_server):
    demo_server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
    exported = re.findall(r"^# TYPE (?:vllm:)?(\S+)", demo_server.get("/metrics").text, re.MULTILINE)
    rows = re.findall(r"^\| (`.*?) \|", text_of("metrics"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(exported)


def test_no_line_of_prose_is_wider_than_the_others():
    for name in sorted(page.stem for page in DOCS.glob("*.md")):
        prose = re.sub(r"^```.*?^```$", "", text_of(name), flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            assert len(line) <= 120 or line.startswith(("|", "    ")), (name, line)


def test_tests_that_pages_name_exist() -> None:
    for page in DOCS.glob("*.md"):
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
            source = (DOCS.parent / path).read_text()
            assert not name or f"def {name}(" in source, f"{page.name} names {path}::{name}"
