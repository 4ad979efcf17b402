"""How a setting is declared: once, as a field of a config class, with default, kind, help and flags in its metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.config.kinds import Kind
from vllm.exceptions import VLLMValidationError

_KEY = "setting"
_SAME = object()
_Config = TypeVar("_Config")


class UnsupportedSettingError(VLLMValidationError, NotImplementedError):
    """A setting asks for a feature that this version does not have."""


@dataclass(frozen=True)
class Setting:
    """What a user may set: a field of EngineArgs, a flag, an entry in the documentation.

    name:      the EngineArgs field.              field:  the config class' field (mostly the same word).
    later:     a feature that does not exist yet: any value but the default is refused; a mapping refuses some values.
    needs:     the switch without which the setting has no effect (said in the log).
    obsolete:  why the setting changes nothing any more (said in the log).
    secret:    no log shows its value.
    idle:      given the resolved configuration, why the setting changes nothing in it, or "" (said in the log).
    """

    name: str
    field: str
    default: Any
    kind: Kind
    help: str
    flags: tuple[str, ...] = ()
    later: str | Mapping[Any, str] = ""
    needs: str = ""
    obsolete: str = ""
    idle: Callable[[Any], str] | None = None
    secret: bool = False

    def new_default(self) -> Any:
        """The default; containers are fresh ones."""
        return type(self.default)(self.default) if isinstance(self.default, dict | list) else self.default

    def feature_missing_for(self, value: Any) -> str:
        """The feature that `value` would need and that does not exist yet, or ""."""
        if isinstance(self.later, str):
            return self.later if value != self.default else ""
        return self.later.get(value, "") if isinstance(value, str | int | None) else ""


def setting(
    default: Any,
    kind: Kind,
    help: str,
    *,
    name: str = "",
    resolved: Any = _SAME,
    flags: tuple[str, ...] = (),
    later: str | Mapping[Any, str] = "",
    needs: str = "",
    obsolete: str = "",
    idle: Callable[[Any], str] | None = None,
    secret: bool = False,
) -> Any:
    """A field of a config class that users may set.

    `default` is what they get; None mostly means "derive it". `resolved` is the field's own default, where a resolved
    config never holds `default`.
    """
    parts = {"name": name, "default": default, "kind": kind, "help": help, "flags": flags, "later": later,
             "needs": needs, "obsolete": obsolete, "idle": idle, "secret": secret}  # fmt: skip
    own = default if resolved is _SAME else resolved
    if isinstance(own, dict | list):
        return dataclasses.field(default_factory=lambda: type(own)(own), metadata={_KEY: parts})
    return dataclasses.field(default=own, metadata={_KEY: parts})


def on_cpu(reason: str) -> Callable[[Any], str]:
    """For `idle`: `reason`, where the model runs on the CPU."""
    return lambda config: reason if config.device_config.device == "cpu" else ""


def settings_of(config_class: type) -> list[Setting]:
    """The settings that a config class declares, in order."""
    found = []
    for field in dataclasses.fields(config_class):
        parts = field.metadata.get(_KEY)
        if parts is not None:
            found.append(Setting(**{**parts, "name": parts["name"] or field.name, "field": field.name}))
    return found


def build(config_class: type[_Config], args: Mapping[str, Any], **resolved: Any) -> _Config:
    """A config object: `resolved` values by field name, everything else from `args` by setting name."""
    values = {s.field: args[s.name] for s in settings_of(config_class) if s.field not in resolved and s.name in args}
    return config_class(**values, **resolved)
