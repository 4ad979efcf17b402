"""General plugins: functions of installed distributions, called once in every process before a model is looked up.

A distribution offers one as an entry point of the group `vllm.general_plugins`; mostly it registers models.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

GENERAL_GROUP = "vllm.general_plugins"


@lru_cache(maxsize=1)
def load_general_plugins() -> None:
    """Call the plugins that VLLM_PLUGINS allows (all, if it is not set), in the order of their names.

    Further calls in the same process do nothing. A plugin that fails is reported in the log, and the others go on: what
    it should have added is then missing, and whoever asks for it learns so.
    """
    allowed = envs.VLLM_PLUGINS
    if allowed == []:
        return
    found = sorted(entry_points(group=GENERAL_GROUP), key=lambda plugin: plugin.name)
    missing = sorted(set(allowed or ()) - {plugin.name for plugin in found})
    if missing:
        names = ", ".join(plugin.name for plugin in found) or "none"
        logger.warning("VLLM_PLUGINS names %s, not installed here. Installed plugins: %s.", ", ".join(missing), names)
    for plugin in found:
        if allowed is None or plugin.name in allowed:
            _run(plugin)


def _run(plugin: EntryPoint) -> None:
    origin = f" of {plugin.dist.name} {plugin.dist.version}" if plugin.dist is not None else ""
    try:
        plugin.load()()
    except Exception:
        logger.exception(
            "The plugin %s%s (%s) failed and is left out. To start without it, name the others in VLLM_PLUGINS.",
            plugin.name,
            origin,
            plugin.value,
        )
    else:
        logger.info("Loaded the plugin %s%s", plugin.name, origin)
