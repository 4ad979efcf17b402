"""All settings together: what EngineArgs, the command line and the documentation are made from, and its checks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from vllm import envs
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.decoding import DecodingConfig
from vllm.config.device import DeviceConfig
from vllm.config.fields import Setting, UnsupportedSettingError, settings_of
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig, PromptAdapterConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.newer import NewerSettings
from vllm.config.observability import ObservabilityConfig
from vllm.config.obsolete import ObsoleteSettings
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.logger import init_logger

logger = init_logger(__name__)

CONFIG_CLASSES: tuple[type, ...] = (
    ModelConfig,
    LoadConfig,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    DeviceConfig,
    CompilationConfig,
    DecodingConfig,
    ObservabilityConfig,
    MultiModalConfig,
    LoRAConfig,
    PromptAdapterConfig,
    SpeculativeConfig,
    NewerSettings,
    ObsoleteSettings,
)


@lru_cache(maxsize=1)
def all_settings() -> tuple[Setting, ...]:
    return tuple(setting for config_class in CONFIG_CLASSES for setting in settings_of(config_class))


def without_secrets(document: Any) -> Any:
    """A configuration as plain data, without what nobody is shown: tokens and keys."""
    secret = {s.field for s in all_settings() if s.secret} | {"s3_access_key_id", "s3_secret_access_key"}

    def hidden(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: "..." if key in secret and item else hidden(item) for key, item in value.items()}
        return [hidden(item) for item in value] if isinstance(value, list) else value

    return hidden(document)


def near_names(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x' or 'y'?", or nothing if no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def check_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """All settings in plain form, types checked; None is an optional setting's default. Raises ValueError."""
    return {s.name: _checked(s, args[s.name]) for s in all_settings()}


def _checked(setting: Setting, value: Any) -> Any:
    plain = setting.kind.check(setting.name, value)
    return setting.new_default() if plain is None else plain


def refuse_missing_features(args: Mapping[str, Any]) -> None:
    """Raise UnsupportedSettingError if a checked value needs a feature that does not exist yet."""
    for setting in all_settings():
        feature = setting.feature_missing_for(_or_default(setting, args))
        if feature:
            raise UnsupportedSettingError(
                f"{feature}: not supported by this version. Leave {setting.name} at its default ({setting.default!r}); "
                f"got {args[setting.name]!r}.",
                parameter=setting.name,
                value=args[setting.name],
            )


def log_useless_settings(args: Mapping[str, Any]) -> None:
    """One log line for each setting or environment variable that was set but changes nothing."""
    for name, reason in envs.set_without_effect().items():
        logger.info("The environment variable %s changes nothing: %s.", name, reason)
    for name in envs.unknown():
        near = near_names(name, envs.environment_variables)
        logger.warning("The environment variable %s is not known and changes nothing.%s", name, near)
    for setting in all_settings():
        if _or_default(setting, args) == setting.default:
            continue
        if setting.obsolete:
            logger.warning("%s is obsolete and changes nothing: %s.", setting.name, setting.obsolete)
        elif setting.needs and not args[setting.needs]:
            logger.warning("%s has no effect without %s.", setting.name, setting.needs)


def log_idle_settings(args: Mapping[str, Any], config: Any) -> None:
    """One log line for each setting or variable that was set and changes nothing in this (resolved) configuration."""
    for name, reason in envs.set_idly(config).items():
        logger.info("The environment variable %s changes nothing here: %s.", name, reason)
    for setting in all_settings():
        if setting.idle is None or _or_default(setting, args) == setting.default:
            continue
        reason = setting.idle(config)
        if reason:
            value = "=..." if setting.secret else f"={args[setting.name]!r}"
            logger.warning("%s%s changes nothing here: %s.", setting.name, value, reason)


def _or_default(setting: Setting, args: Mapping[str, Any]) -> Any:
    """The value of a checked setting; an empty container is as good as a default of None."""
    value = args[setting.name]
    empty = isinstance(value, dict | list | str) and not value and not setting.default
    return setting.default if empty else value
