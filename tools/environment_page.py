"""Writes the page of environment variables: `python -m tools.environment_page > docs/environment.md`."""

from __future__ import annotations

from vllm.envs import EnvVar, environment_variables

_HEADER = """# Environment variables

They are read when they are used. A value of another form than expected is an error that names the variable. Flags are 1
or 0.

This page is generated: `python -m tools.environment_page > docs/environment.md`.
"""
_TABLE = "| variable | default | meaning |\n|---|---|---|"


def markdown() -> str:
    """The whole page."""
    variables = environment_variables.values()
    used = [_row(v, v.help) for v in variables if not v.unused]
    unused = [_row(v, f"{v.help} Here: {v.unused}.") for v in variables if v.unused]
    return "\n".join(
        [
            _HEADER,
            _TABLE,
            *used,
            "",
            "## Known, without effect",
            "",
            "So that settings of other versions do no harm.",
            "",
        ]
        + [_TABLE, *unused, ""]
    )


def _row(variable: EnvVar, meaning: str) -> str:
    default = "computed" if callable(variable.default) else _shown(variable.default)
    return f"| `{variable.name}` | {default} | {meaning.replace('|', chr(92) + '|')} |"


def _shown(value: object) -> str:
    if value is None or value == "":
        return ""
    return f"`{int(value)}`" if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    print(markdown(), end="")
