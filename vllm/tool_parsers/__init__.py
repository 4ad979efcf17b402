"""How models write tool calls, and what reads them: `--tool-call-parser`.

deltas    what a piece of text adds to a message
machine   the core of all parsers
*_calls   families of formats; harmony for gpt-oss
registry  formats by name
plugin    parsers of the user's own
"""

from __future__ import annotations

from typing import Any

PLUGIN_NAMES = ("ToolParser", "ToolParserManager")


def __getattr__(name: str) -> Any:
    if name not in PLUGIN_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.tool_parsers import plugin

    return getattr(plugin, name)
