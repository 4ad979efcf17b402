"""Log lines: their format, where they go (stderr), and that no value inside them can forge another line."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from numbers import Number
from typing import Any

from vllm import envs

FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


def _escapes(keep: str) -> dict[int, str]:
    """Control characters and Unicode line separators -> their escaped spelling, except those in `keep`."""
    codes = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
    return {code: ascii(chr(code))[1:-1] for code in codes if chr(code) not in keep}


_IN_VALUE = _escapes(keep="\t")
_IN_LINE = _escapes(keep="\t\n")


def escape(text: str) -> str:
    """`text` on one line: line breaks, terminal escapes and other control characters spelled out."""
    return text.translate(_IN_VALUE)


class _Escaped:
    """An argument of a log call, escaped in whatever way the message prints it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return escape(str(self._value))

    def __repr__(self) -> str:
        return escape(repr(self._value))


def _escape_argument(value: Any) -> Any:
    # Numbers pass, because "%d" and "%.1f" need them.
    return value if isinstance(value, Number) else _Escaped(value)


class SafeFormatter(logging.Formatter):
    """Escapes every interpolated value, and repeats the prefix on each line of a message with several."""

    def format(self, record: logging.LogRecord) -> str:
        safe = logging.makeLogRecord(record.__dict__)
        safe.msg = str(record.msg)
        if isinstance(record.args, Mapping):
            safe.args = {key: _escape_argument(value) for key, value in record.args.items()}
        elif record.args:
            safe.args = tuple(_escape_argument(value) for value in record.args)
        line = super().format(safe).translate(_IN_LINE)
        if "\n" not in line:
            return line
        prefix = line.partition(safe.message.translate(_IN_LINE))[0] if safe.message else ""
        return line.replace("\n", "\n" + prefix)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg] # no type arguments before Python 3.11
    """Writes to whatever `sys.stderr` is at that moment, so that a redirected stream is followed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def _configure_default() -> None:
    handler = _StderrHandler()
    handler.setFormatter(SafeFormatter(FORMAT, DATE_FORMAT))
    root = logging.getLogger("vllm")
    root.addHandler(handler)
    root.setLevel(envs.VLLM_LOGGING_LEVEL)
    root.propagate = False


def _configure_from_file(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except OSError as error:
        raise RuntimeError(
            f"VLLM_LOGGING_CONFIG_PATH must name a readable JSON file, got {path!r}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ValueError(f"VLLM_LOGGING_CONFIG_PATH must name a JSON file; {path!r} does not parse: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"VLLM_LOGGING_CONFIG_PATH: {path!r} must hold a JSON object for logging.config.dictConfig, "
            f"got {type(settings).__name__}"
        )
    logging.config.dictConfig(settings)


@lru_cache(maxsize=1)
def _configure_once() -> None:
    path = envs.VLLM_LOGGING_CONFIG_PATH
    if not envs.VLLM_CONFIGURE_LOGGING:
        if path:
            raise RuntimeError(
                f"VLLM_LOGGING_CONFIG_PATH={path!r} needs VLLM_CONFIGURE_LOGGING=1, got 0; unset one of the two"
            )
        return
    if path:
        _configure_from_file(path)
    else:
        _configure_default()


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; the first call sets up logging as the environment asks.

    Pass values as arguments (`logger.info("got %s", value)`), never inside the message: only arguments are escaped.
    """
    _configure_once()
    return logging.getLogger(name)


def mark_lines(who: str) -> None:
    """Begin every line of this process with who it is, where lines look as they do by default."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, _StderrHandler):
            handler.setFormatter(SafeFormatter(f"({who} pid={os.getpid()}) {FORMAT}", DATE_FORMAT))
