"""Settings of CUDA graphs. Nothing is compiled: start-up is a feature."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config.fields import on_cpu, setting
from vllm.config.kinds import Integer, Kind, NumberList, parse_json

_MAX_LEVEL = 3
_LARGEST_GRAPH = 1024
DEFAULT_GRAPH_SIZES = [512]  # the API's default, which stands for our own series
# Keys of a compilation_config of other versions; those without an entry in `CompilationConfig` steer a compiler.
_COMPILER_KEYS = frozenset({
    "debug_dump_path", "cache_dir", "backend", "custom_ops", "splitting_ops", "use_inductor", "compile_sizes",
    "inductor_compile_config", "inductor_passes", "cudagraph_num_of_warmups", "cudagraph_copy_inputs",
    "full_cuda_graph", "pass_config", "max_capture_size", "mode", "cudagraph_mode",
})  # fmt: skip
_NO_GRAPHS = on_cpu("there are no CUDA graphs on the CPU")
_OWN_KEYS = frozenset({"level", "use_cudagraph", "cudagraph_capture_sizes"})


@dataclass(frozen=True)
class _Compilation(Kind):
    """A level, a JSON object or a `CompilationConfig`, which users find; a dictionary once it is checked."""

    @property
    def words(self) -> str:
        return "JSON object or a level from 0 to 3"

    def held(self, value: Any) -> Any:
        try:
            return CompilationConfig.of(value or {})
        except ValueError:
            return value  # which the check refuses

    def cli(self) -> dict[str, Any]:
        return {"type": lambda text: self.held(self.parse(text))}

    def _check(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, CompilationConfig):
            return value.keys()
        return read_compilation_config(value)

    def _parse(self, text: str) -> Any:
        value = parse_json(text)
        if isinstance(value, bool) or not isinstance(value, int | Mapping):
            raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {dict}.")
        return {"level": value} if isinstance(value, int) else value


@dataclass(frozen=True)
class CompilationConfig:
    """CUDA graphs: whether they are used, and for which batch sizes.

    `cudagraph_capture_sizes` is empty where there are no graphs; else the batch sizes, ascending (a list, as given,
    before the configuration is resolved). Users may make one
    with the keys of a compilation_config and give it to the engine; those that steer a compiler change nothing, and
    are attributes as they were given (None otherwise).
    """

    given: dict[str, Any] = setting(
        {},
        _Compilation(optional=True),
        "A level from 0 to 3, or a JSON object. Nothing is compiled at any level; use_cudagraph and "
        "cudagraph_capture_sizes steer CUDA graphs.",
        name="compilation_config",
        flags=("-O",),
    )
    cuda_graph_sizes: list[int] | None = setting(
        DEFAULT_GRAPH_SIZES,
        NumberList(optional=True, whole=True),
        "Batch sizes of CUDA graphs; another single number is the largest of a default series.",
        idle=_NO_GRAPHS,
    )
    capture_sizes: list[int] | None = setting(
        None,
        NumberList(optional=True, whole=True),
        "Batch sizes of CUDA graphs, exactly these.",
        name="cudagraph_capture_sizes",
        idle=_NO_GRAPHS,
    )
    max_cudagraph_capture_size: int | None = setting(
        None,
        Integer(low=1, optional=True),
        "The largest of the default series of batch sizes of CUDA graphs.",
        idle=_NO_GRAPHS,
    )
    level: int = 0
    use_cudagraph: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = field(default=())

    @classmethod
    def from_cli(cls, cli_value: str) -> CompilationConfig:
        """What `--compilation-config` or `-O` was given: a level or a JSON object."""
        return cls.of(_Compilation().parse(cli_value))

    @classmethod
    def of(cls, given: int | Mapping[str, Any] | CompilationConfig) -> CompilationConfig:
        """The config that a level or the keys of a compilation_config stand for. Raises ValueError."""
        if isinstance(given, CompilationConfig):
            return given
        keys = read_compilation_config(given)
        return cls(given=keys, **{key: value for key, value in keys.items() if key in _OWN_KEYS and value is not None})

    def __getattr__(self, name: str) -> Any:
        if name in _COMPILER_KEYS:
            return self.given.get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def keys(self) -> dict[str, Any]:
        """This config as the dictionary that makes an equal one."""
        own: dict[str, Any] = {}
        if self.level:
            own["level"] = self.level
        if self.cudagraph_capture_sizes:
            own["cudagraph_capture_sizes"] = list(self.cudagraph_capture_sizes)
        return {**self.given, **own}


def read_compilation_config(given: Any) -> dict[str, Any]:
    """A compilation_config in its dictionary form, its keys checked."""
    if given is None:
        return {}
    if isinstance(given, int):
        given = {"level": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"compilation_config must be a dict or a level from 0 to {_MAX_LEVEL}, got {given!r}.")
    unknown = sorted(str(key) for key in given if key not in _COMPILER_KEYS | _OWN_KEYS)
    if unknown:
        known = ", ".join(sorted(_COMPILER_KEYS | _OWN_KEYS))
        raise ValueError(f"compilation_config has unknown keys {', '.join(unknown)}; known are {known}.")
    level = given.get("level", 0)
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= _MAX_LEVEL:
        raise ValueError(f"compilation_config: level must be an integer from 0 to {_MAX_LEVEL}, got {level!r}.")
    sizes = given.get("cudagraph_capture_sizes")
    NumberList(optional=True, whole=True).check("compilation_config: cudagraph_capture_sizes", sizes)
    if not isinstance(given.get("use_cudagraph", True), bool):
        raise ValueError(f"compilation_config: use_cudagraph must be true or false, got {given['use_cudagraph']!r}.")
    return dict(given)


def compiler_keys(given: Mapping[str, Any]) -> list[str]:
    """The keys of a compilation_config that steer a compiler, and so change nothing here."""
    return sorted(key for key in given if key in _COMPILER_KEYS)


def graph_sizes(largest: int | None, exact: list[int] | None, max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs, ascending, none above `max_num_seqs`: `exact`, or a series up to `largest`.

    The series has steps of at most an eighth of the size (but of 64 and more), so that padding costs little.
    """
    if exact is not None:
        return tuple(sorted({size for size in exact if size <= max_num_seqs}))
    limit = min(largest or _LARGEST_GRAPH, max_num_seqs)
    series = {1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 513, 64), *range(640, 1025, 128)}
    return tuple(sorted({size for size in series if size < limit} | {limit}))
