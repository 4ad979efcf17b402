"""FlexibleArgumentParser: spellings, flags with values, dotted keys, config files, commands, and clear errors."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from vllm import EngineArgs
from vllm.utils import FlexibleArgumentParser
from vllm.utils.argparse import BooleanWithValue


def parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="test")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--some-name", default="none")
    parser.add_argument("--odd_name", default="none")
    parser.add_argument("--flag", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--maybe", action=BooleanWithValue, default=None)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--settings", "-S", type=json.loads, default={})
    parser.add_argument("--names", nargs="+", default=[])
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--origins", type=json.loads, default=["*"])
    return parser


def parse(words: str | list[str]) -> dict[str, Any]:
    return vars(parser().parse_args(words.split() if isinstance(words, str) else words))


def error(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def config(tmp_path: Path, text: str, name: str = "c.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


@pytest.mark.parametrize("words", ["--some-name x", "--some_name x", "--some_name=x", "--some-name=x", "--some_na x"])
def test_dashes_and_underscores_are_the_same(words: str) -> None:
    assert parse(words)["some_name"] == "x"


@pytest.mark.parametrize("words", ["--odd_name x", "--odd-name x", "--odd-name=x"])
def test_an_option_declared_with_underscores_has_both_spellings(words: str) -> None:
    assert parse(words)["odd_name"] == "x"


def test_values_keep_their_underscores_and_dots() -> None:
    assert parse("--some_name=a_b.c=d_e")["some_name"] == "a_b.c=d_e"
    assert parse(["--some-name", "--x_y"[2:]])["some_name"] == "x_y"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--flag", True), ("--no-flag", False), ("--flag=true", True), ("--flag=False", False), ("--flag=0", False),
        ("--no-flag=false", True), ("--flag --no-flag", False), ("", False),
    ],
)  # fmt: skip
def test_flags_take_values_and_negation(words: str, value: bool) -> None:
    assert parse(words)["flag"] is value


def test_a_plain_flag_does_not_take_the_next_word() -> None:
    only = FlexibleArgumentParser()
    only.add_argument("model")
    only.add_argument("--flag", action=argparse.BooleanOptionalAction)
    only.add_argument("--maybe", action=BooleanWithValue)
    assert vars(only.parse_args(["--flag", "true"])) == {"model": "true", "flag": True, "maybe": None}
    assert vars(only.parse_args(["--maybe", "m"])) == {"model": "m", "flag": None, "maybe": True}
    assert vars(only.parse_args(["--maybe", "false", "m"])) == {"model": "m", "flag": None, "maybe": False}


def test_a_stored_flag_may_be_false() -> None:
    assert parse("--store=true")["store"] is True
    assert parse("--store=false")["store"] is False


# ---- dotted keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--settings.a 1", {"a": 1}),
        ("--settings.a=1 --settings.b.c=x", {"a": 1, "b": {"c": "x"}}),
        ("-S.a true", {"a": True}),
        ("--settings.some-key 2 --settings.some_key 3", {"some-key": 2, "some_key": 3}),
        ('--settings.list [1,"two"]', {"list": [1, "two"]}),
        ('--settings {"a":1,"b":{"c":2}} --settings.b.d 3', {"a": 1, "b": {"c": 2, "d": 3}}),
        ('--settings.b.d 3 --settings={"b":{"c":2}}', {"b": {"c": 2, "d": 3}}),
        ("--settings.a 1 --settings.a 2", {"a": 2}),
        ("--settings.a -5", {"a": -5}),
        ("--settings.a.b+ -x --settings.a.b+=+y,-z", {"a": {"b": ["-x", "+y", "-z"]}}),
    ],
)
def test_dotted_keys_build_an_object(words: str, value: Any) -> None:
    assert parse(words)["settings"] == value


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("-O3", {"level": 3}),
        ("-O 2", {"level": 2}),
        ("-O=1", {"level": 1}),
        ("-O.backend x -O1", {"backend": "x", "level": 1}),
        ("-O1 -O.level 2 -O3", {"level": 3}),
        ('-O {"backend":"y"} -O2', {"backend": "y", "level": 2}),
        ("-O.custom_ops+ -quant_fp8 -O.custom_ops+=+silu_mul,-rms_norm",
         {"custom_ops": ["-quant_fp8", "+silu_mul", "-rms_norm"]}),
    ],
)  # fmt: skip
def test_levels_of_compilation_are_keys_like_others(words: str, value: Any) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("-O", "--compilation-config", type=json.loads)
    assert parser.parse_args(words.split()).compilation_config == value


def test_the_last_of_duplicate_keys_counts_and_the_log_names_them(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        assert parse("--settings.a 1 --settings.a 2 --settings.b 3")["settings"] == {"a": 2, "b": 3}
    finally:
        logger.removeHandler(caplog.handler)
    assert "duplicate" in caplog.text
    assert "--settings.a" in caplog.text
    assert "--settings.b" not in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--settings.a"], "expected a value"),
        (["--settings.a..b", "1"], "empty name between dots"),
        (["--settings.", "1"], "empty name between dots"),
        (["--settings.a", "1", "--settings.a.b", "2"], "already has a value that is no object"),
        (["--settings", "5", "--settings.a", "1"], "not both"),
        (["--settings.a", "1", "--settings.a+", "2"], "already has a value that is no list"),
        (["--nothing.a", "1"], "unrecognized arguments: --nothing.a"),
    ],
)
def test_wrong_dotted_keys_are_explained(words: list[str], message: str, capsys: Any) -> None:
    assert message in error(words, capsys)


# ---- config files ---------------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, "port: 1234\nsome_name: from-file\n")
    assert parse(["--config", file])["port"] == 1234
    for words in (["--config", file, "--port", "1"], ["--port", "1", f"--config={file}"]):
        values = parse(words)
        assert (values["port"], values["some_name"], values["odd_name"]) == (1, "from-file", "none")


def test_an_abbreviated_option_wins_too(tmp_path: Path) -> None:
    assert parse(["--config", config(tmp_path, "some-name: file"), "--some-na", "line"])["some_name"] == "line"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("flag: true", "flag", True),
        ("flag: false", "flag", False),
        ("maybe: false", "maybe", False),
        ("store: true", "store", True),
        ("store: false", "store", False),
        ("port: ", "port", 8000),
        ("names: [a, b]", "names", ["a", "b"]),
        ("names: a", "names", ["a"]),
        ("names:\n  - a\n  - 5", "names", ["a", "5"]),
        ("middleware: [a, b]", "middleware", ["a", "b"]),
        ("settings: {a: 1, b: {c: [1, 2]}}", "settings", {"a": 1, "b": {"c": [1, 2]}}),
        ("settings.a: 1", "settings", {"a": 1}),
        ("origins: [x, y]", "origins", ["x", "y"]),
        ("some-name: '-x'", "some_name", "-x"),
        ("some-name: a b", "some_name", "a b"),
        ("odd-name: x", "odd_name", "x"),
        ("", "port", 8000),
        ("# nothing", "port", 8000),
    ],
)
def test_every_kind_of_value_can_stand_in_the_file(tmp_path: Path, text: str, name: str, value: Any) -> None:
    assert parse(["--config", config(tmp_path, text)])[name] == value


def test_the_command_line_replaces_a_list_of_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, "middleware: [a, b]\nnames: [c]\nsettings: {x: 1}")
    values = parse(["--config", file, "--middleware", "z", "--names", "y", "--settings.w", "2"])
    assert (values["middleware"], values["names"], values["settings"]) == (["z"], ["y"], {"w": 2})


def test_a_list_in_the_file_does_not_swallow_the_positional_argument(tmp_path: Path) -> None:
    with_model = FlexibleArgumentParser()
    with_model.add_argument("model")
    with_model.add_argument("--names", nargs="+")
    values = with_model.parse_args(["--config", config(tmp_path, "names: [a, b]"), "m"])
    assert (values.model, values.names) == ("m", ["a", "b"])


def test_a_command_reads_its_own_file(tmp_path: Path) -> None:
    main = FlexibleArgumentParser()
    serve = main.add_subparsers(dest="command").add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--port", type=int)
    serve.add_argument("--enable_this", action=argparse.BooleanOptionalAction)
    file = config(tmp_path, "port: 5\nenable-this: true\n")
    values = main.parse_args(["serve", "m", "--config", file])
    assert (values.command, values.model, values.port, values.enable_this) == ("serve", "m", 5, True)
    assert main.parse_args(["serve", "--port", "6", "m", f"--config={file}"]).port == 6


def test_a_declared_config_option_keeps_the_name_of_the_file(tmp_path: Path) -> None:
    declared = FlexibleArgumentParser()
    declared.add_argument("--config")
    declared.add_argument("--port", type=int)
    file = config(tmp_path, "port: 5")
    assert vars(declared.parse_args(["--config", file])) == {"config": file, "port": 5}


def test_words_after_a_double_dash_are_left_alone(tmp_path: Path) -> None:
    rest = FlexibleArgumentParser()
    rest.add_argument("--port", type=int)
    rest.add_argument("words", nargs="*")
    file = config(tmp_path, "port: 5")
    values = rest.parse_args(["--config", file, "--", "--some_thing=x", "--config"])
    assert (values.port, values.words) == (5, ["--some_thing=x", "--config"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown option 'prot'. Did you mean --port"),
        ("port: abc", "argument --port: invalid int value: 'abc'"),
        ("flag: maybe", "--flag must be true or false, got 'maybe'"),
        ("- port", "expected `option: value` lines, got a list"),
        ("just text", "expected `option: value` lines, got a str"),
        ("port: [1", "is not valid YAML"),
        ("port: 1\nport: 2", "option 'port' is there twice"),
        ("some-name: x\nsome_name: y", "option 'some_name' is there twice"),
        ("a: &a [x]\nb: *a", "YAML aliases"),
        ("some-name: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("x: " + "[" * 5000, "is not valid YAML"),
        ("x: " + "y" * (2**20), "at most 1048576 bytes"),
    ],
)
def test_a_wrong_config_file_is_explained(tmp_path: Path, text: str, message: str, capsys: Any) -> None:
    assert message in error(["--config", config(tmp_path, text)], capsys)


def test_a_config_file_must_be_there_once_and_be_yaml(tmp_path: Path, capsys: Any) -> None:
    file = config(tmp_path, "port: 1")
    assert "cannot be read: No such file" in error(["--config", str(tmp_path / "none.yaml")], capsys)
    assert "must be of a yaml/yml type" in error(["--config", config(tmp_path, "", "c.json")], capsys)
    assert "More than one config file" in error(["--config", file, f"--config={file}"], capsys)
    assert "No config file specified" in error(["--config"], capsys)
    (tmp_path / "bad.yaml").write_bytes(b"port: \xff\xfe")
    assert "is not UTF-8 text" in error(["--config", str(tmp_path / "bad.yaml")], capsys)


def test_an_unknown_word_names_the_near_ones(capsys: Any) -> None:
    assert "unrecognized arguments: --prot 5. Did you mean --port" in error(["--prot", "5"], capsys)
    assert "--data-parallel-size-local says how many copies" in error(["--headless"], capsys)
    both = error(["--headless", "--data-parallel-start-rank", "2"], capsys)  # vLLM's second host has both
    assert both.count("start a server on each host") == 1 and "hosts behind one server\n" in both
    assert "a load balancer of your own" in error(["--data_parallel_start_rank=2"], capsys)


def test_engine_arguments_come_from_a_file(tmp_path: Path) -> None:
    file = config(tmp_path, """
        model: demo
        tensor_parallel_size: 2
        max-model-len: 16K
        enable-prefix-caching: false
        rope-scaling: {type: linear, factor: 2.0}
        served-model-name: [a, b]
        hf-overrides.vocab_size: 99
        seed: 5
    """.replace("\n        ", "\n"))  # fmt: skip
    args = EngineArgs.from_cli_args(
        EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--config", file, "-tp", "4"])
    )
    assert args == EngineArgs(
        "demo", tensor_parallel_size=4, max_model_len=16384, enable_prefix_caching=False, seed=5,
        rope_scaling={"type": "linear", "factor": 2.0}, served_model_name=["a", "b"], hf_overrides={"vocab_size": 99},
    )  # fmt: skip
