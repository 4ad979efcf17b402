"""Tool parsers under the names that plug-ins import; they live in `vllm.tool_parsers`."""

from __future__ import annotations

from vllm.tool_parsers.plugin import BUILT_IN, CLASS_NAMES, ToolParser, ToolParserManager

globals().update({class_name: BUILT_IN[name] for name, class_name in CLASS_NAMES.items()})

__all__ = ["ToolParser", "ToolParserManager", *CLASS_NAMES.values()]
