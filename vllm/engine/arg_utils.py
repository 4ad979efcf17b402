"""EngineArgs: what a user may say about an engine, in Python or as flags. Its fields are made from `vllm.config`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.config import CompilationConfig, LoadConfig, ModelConfig, UnsupportedSettingError, VllmConfig
from vllm.config.fields import Setting, build, settings_of
from vllm.config.kinds import Flag
from vllm.config.observability import RequestLogSettings
from vllm.config.settings import CONFIG_CLASSES, all_settings, check_settings, near_names
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse import BooleanWithValue, FlexibleArgumentParser

_Args = TypeVar("_Args", bound="EngineArgs")


def _make_field(setting: Setting) -> tuple[str, Any, Any]:
    if isinstance(setting.default, dict | list):
        return setting.name, Any, dataclasses.field(default_factory=setting.new_default)
    return setting.name, Any, dataclasses.field(default=setting.default)


if TYPE_CHECKING:

    class _Fields:
        """The generated dataclass; its fields are those of `vllm.config.settings.all_settings()`."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

else:
    _Fields = dataclasses.make_dataclass("_Fields", [_make_field(s) for s in all_settings()], init=False)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


class EngineArgs(_Fields):
    """Arguments of an engine: one field per setting, the model first. `vars(args)` gives them as keywords for `LLM`.

    The values are checked when the configuration is made (`create_engine_config`). Raises TypeError for a field that
    does not exist, and names the near ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = _fields_of(type(self))
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__} takes at most {len(fields)} arguments, got {len(args)}.")
        values = dict(zip(fields, args, strict=False))
        for name, value in kwargs.items():
            if name not in fields:
                raise TypeError(
                    f"{type(self).__name__} has no argument {name!r}.{near_names(name, fields)} "
                    "All arguments are listed by `vllm serve --help`."
                )
            if name in values:
                raise TypeError(f"{type(self).__name__} got two values for the argument {name!r}.")
            values[name] = value
        kinds = {setting.name: setting.kind for setting in all_settings()}
        for name, field in fields.items():
            value = values[name] if name in values else _default(field)
            setattr(self, name, kinds[name].held(value) if name in kinds else value)

    # ---- command line --------------------------------------------------------------------------------------------

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Add a flag for every field to `parser`, and return it."""
        for config_class in CONFIG_CLASSES:
            _add_group(parser, config_class)
        return parser

    @classmethod
    def from_cli_args(cls: type[_Args], args: argparse.Namespace) -> _Args:
        """The arguments that a parser with `add_cli_args` has read; fields that it does not have keep their default."""
        given = vars(args)
        return cls(**{name: given[name] for name in _fields_of(cls) if name in given})

    # ---- configuration -------------------------------------------------------------------------------------------

    def create_engine_config(self, usage_context: UsageContext | None = None) -> VllmConfig:
        """The configuration that these arguments stand for: every default derived, every value checked.

        `usage_context` (offline or server) decides about the default size of a step. Raises ValueError; for a feature
        that this version does not have it is also a NotImplementedError.
        """
        from vllm.config.resolve import resolve

        load_general_plugins()  # they may register the model that is meant
        return resolve(self._settings(), usage_context or UsageContext.ENGINE_CONTEXT)

    def create_model_config(self) -> ModelConfig:
        """The model's part of the configuration."""
        return self.create_engine_config().model_config

    def create_load_config(self) -> LoadConfig:
        """The part of the configuration that is about reading weights."""
        return build(LoadConfig, check_settings(self._settings()))

    def _settings(self) -> dict[str, Any]:
        return {setting.name: getattr(self, setting.name) for setting in all_settings()}

    # ---- JSON ----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """A JSON document that `from_json` turns back into equal arguments.

        Raises ValueError for values that only exist in this process (functions, classes).
        """
        try:
            return json.dumps(vars(self), default=_plain)
        except (TypeError, ValueError, RecursionError):
            pass
        for name, value in vars(self).items():
            try:
                json.dumps(value, default=_plain)
            except (TypeError, ValueError, RecursionError):
                raise ValueError(
                    f"{name} is a {type(value).__name__}, which cannot be sent to another process as JSON. "
                    "Give it as plain data (text, numbers, lists, dictionaries)."
                ) from None
        raise ValueError("These arguments cannot be written as JSON.")

    @classmethod
    def from_json(cls: type[_Args], document: str | bytes | Mapping[str, Any]) -> _Args:
        """The arguments of a document made by `to_json` (also already parsed)."""
        fields = document if isinstance(document, Mapping) else json.loads(document)
        if not isinstance(fields, Mapping):
            raise ValueError(f"{cls.__name__} as JSON must be an object, got a {type(fields).__name__}.")
        return cls(**fields)


def _plain(value: Any) -> Any:
    """What stands for `value` in JSON."""
    if isinstance(value, CompilationConfig):
        return value.keys()
    raise TypeError(f"a {type(value).__name__} is no plain data")


def _fields_of(cls: type[EngineArgs]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


if TYPE_CHECKING:
    _AsyncFields = EngineArgs
else:
    _AsyncFields = dataclasses.make_dataclass(
        "_AsyncFields", [_make_field(s) for s in settings_of(RequestLogSettings)], bases=(EngineArgs,), init=False
    )


class AsyncEngineArgs(_AsyncFields):
    """Arguments of an engine that runs in the background: those of EngineArgs, and whether requests are logged."""

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser, async_args_only: bool = False) -> FlexibleArgumentParser:
        """Add a flag for every field to `parser` (only for the fields that EngineArgs lacks), and return it."""
        if not async_args_only:
            parser = super().add_cli_args(parser)
        _add_group(parser, RequestLogSettings)
        return parser

    @property
    def log_requests(self) -> bool:
        """Whether each request is logged: `enable_log_requests` if it was given, else not `disable_log_requests`."""
        enabled: bool | None = self.enable_log_requests
        return not self.disable_log_requests if enabled is None else enabled

    def create_engine_config(self, usage_context: UsageContext | None = None) -> VllmConfig:
        for setting in settings_of(RequestLogSettings):
            setting.kind.check(setting.name, getattr(self, setting.name))
        if self.engine_use_ray:
            raise UnsupportedSettingError(
                "engine_use_ray: the engine cannot run in a Ray process. Leave it at its default (False).",
                parameter="engine_use_ray",
                value=True,
            )
        return super().create_engine_config(usage_context)


def _add_group(parser: FlexibleArgumentParser, config_class: type) -> None:
    group = parser.add_argument_group(config_class.__name__, (config_class.__doc__ or "").splitlines()[0])
    for setting in settings_of(config_class):
        _add_flag(group, setting)


def _add_flag(group: Any, setting: Setting) -> None:
    name = "--" + setting.name.replace("_", "-")
    options = setting.kind.cli()
    default = "" if setting.default in (None, "", {}, []) else f" Default: {setting.default}."
    if isinstance(setting.kind, Flag) and setting.default is False:
        default = ""
    notes = ""
    if isinstance(setting.later, str) and setting.later:
        notes = " (Not supported by this version.)"
    elif setting.obsolete:
        notes = f" (Obsolete: {setting.obsolete}.)"
    help_text = (setting.help + default + notes).replace("%", "%%")
    if isinstance(setting.kind, Flag):
        options["action"] = BooleanWithValue if setting.kind.value_follows else argparse.BooleanOptionalAction
    group.add_argument(
        *setting.flags,
        name,
        dest=setting.name,
        default=setting.kind.held(setting.new_default()),
        help=help_text,
        **options,
    )
