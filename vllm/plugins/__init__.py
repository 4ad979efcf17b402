"""General plugins: functions of installed distributions, called once in every process before a model is looked up.

A distribution offers one as an entry point of the group `vllm.general_plugins`; mostly it registers models.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

GENERAL_GROUP = "vllm.general_plugins"
PLATFORM_GROUP = "vllm.platform_plugins"  # functions that return the path of a `Platform`, or None
STAT_LOGGER_GROUP = "vllm.stat_logger_plugins"  # classes derived from `StatLoggerBase`


@lru_cache(maxsize=1)
def load_general_plugins() -> None:
    """Call the plugins that VLLM_PLUGINS allows (all, if it is not set), in the order of their names.

    Further calls in the same process do nothing. A plugin that fails is reported in the log, and the others go on: what
    it should have added is then missing, and whoever asks for it learns so.
    """
    allowed = envs.VLLM_PLUGINS
    if allowed == []:
        return
    found = _installed(GENERAL_GROUP)
    missing = sorted(set(allowed or ()) - {plugin.name for plugin in found})
    if missing:
        names = ", ".join(plugin.name for plugin in found) or "none"
        logger.warning("VLLM_PLUGINS names %s, not installed here. Installed plugins: %s.", ", ".join(missing), names)
    for plugin in found:
        if allowed is None or plugin.name in allowed:
            _run(plugin)


def _installed(group: str) -> list[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda plugin: plugin.name)


@lru_cache(maxsize=8)
def plugins_of(group: str) -> dict[str, Any]:
    """What the plugins of a group are, by name, those that VLLM_PLUGINS allows; one that fails is left out."""
    allowed = envs.VLLM_PLUGINS
    loaded = {}
    for plugin in _installed(group):
        if allowed is None or plugin.name in allowed:
            try:
                loaded[plugin.name] = plugin.load()
            except Exception:
                _report(plugin)
    return loaded


def _run(plugin: EntryPoint) -> None:
    try:
        plugin.load()()
    except Exception:
        _report(plugin)
    else:
        logger.info("Loaded the plugin %s%s", plugin.name, _origin(plugin))


def _origin(plugin: EntryPoint) -> str:
    return f" of {plugin.dist.name} {plugin.dist.version}" if plugin.dist is not None else ""


def _report(plugin: EntryPoint) -> None:
    """Log the error that is being handled."""
    logger.exception(
        "The plugin %s%s (%s) failed and is left out. To start without it, name the others in VLLM_PLUGINS.",
        plugin.name,
        _origin(plugin),
        plugin.value,
    )
