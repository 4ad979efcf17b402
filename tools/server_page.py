"""Writes the page of the server's flags: `python -m tools.server_page > docs/server_arguments.md`."""

from __future__ import annotations

import argparse

from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse import FlexibleArgumentParser

_HEADER = """# Flags of the server

`vllm serve MODEL [flags]`; the [engine arguments](engine_arguments.md) are flags, too. In a `--config` file write the
name without dashes in front. A flag whose feature is not supported by this version ends the start with a message that
says so.

This page is generated: `python -m tools.server_page > docs/server_arguments.md`.

| flag | values | meaning |
|---|---|---|"""
_KINDS = {int: "integer", float: "number"}


def markdown() -> str:
    """The whole page."""
    parser = make_arg_parser(FlexibleArgumentParser())
    group = next(group for group in parser._action_groups if group.title == "server")
    return "\n".join([_HEADER, *map(_row, group._group_actions), ""])


def _row(action: argparse.Action) -> str:
    help_text = (action.help or "").replace("|", "\\|")
    return f"| `{action.option_strings[0]}` | {_values(action)} | {help_text} |"


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if callable(action.type) and action.type not in _KINDS:
        return "JSON list of texts"
    kind = _KINDS.get(action.type, "text")  # type: ignore[arg-type]
    if isinstance(action, argparse._AppendAction):
        return f"{kind}; may be given several times"
    return f"one or more of {kind}" if action.nargs == "+" else kind


if __name__ == "__main__":
    print(markdown(), end="")
