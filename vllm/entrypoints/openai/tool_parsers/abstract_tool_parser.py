"""The module from which plug-ins import the interface of tool parsers."""

from vllm.tool_parsers.plugin import ToolParser, ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]
