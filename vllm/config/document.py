"""Writes docs/engine_arguments.md: `python -m vllm.config.document > docs/engine_arguments.md`."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config.fields import Setting, settings_of
from vllm.config.observability import RequestLogSettings
from vllm.config.settings import CONFIG_CLASSES

_HEADER = """# Engine arguments

Every argument of `EngineArgs` and `LLM`, and the flag of the same name for `vllm serve`. In a `--config` file write the
name without dashes in front. `vllm serve ... --explain` prints the value of every argument that was left open, and why.

This page is generated: `python -m vllm.config.document > docs/engine_arguments.md`.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join([_HEADER, *(_section(cls) for cls in (*CONFIG_CLASSES, RequestLogSettings))])


def _section(config_class: type) -> str:
    rows = "\n".join(_row(setting) for setting in settings_of(config_class))
    title, about = config_class.__name__, (config_class.__doc__ or "").splitlines()[0]
    return f"## {title}\n\n{about}\n\n| argument | values | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _row(setting: Setting) -> str:
    names = ", ".join(f"`{name}`" for name in (setting.name, *setting.flags))
    cells = (names, setting.kind.words, f"`{setting.default!r}`", " ".join([setting.help, *_notes(setting)]))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _notes(setting: Setting) -> Iterator[str]:
    if isinstance(setting.later, str) and setting.later:
        yield "*Not supported by this version: any other value is an error.*"
    elif setting.later:
        values = ", ".join(f"`{value}`" for value in setting.later)
        yield f"*Not supported by this version: {values}.*"
    if setting.obsolete:
        yield f"*Changes nothing: {setting.obsolete}.*"
    if setting.needs:
        yield f"*Needs `{setting.needs}`.*"


if __name__ == "__main__":
    print(markdown(), end="")
