"""FlexibleArgumentParser: argparse with `--config file.yaml`, dotted keys, `-` or `_`, and near names in errors."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm.logger import init_logger

logger = init_logger(__name__)

_MAX_CONFIG_BYTES = 2**20
_SHORT_USAGE = 20  # flags whose usage fits on a screen
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_FLAG_ACTIONS = (argparse.BooleanOptionalAction, argparse._StoreTrueAction, argparse._StoreFalseAction)

_ONE_SERVER_PER_HOST = (
    "start a server on each host, --data-parallel-size-local says how many copies it runs, and put a load balancer of "
    "your own in front. On a Ray cluster --data-parallel-backend ray places copies on all hosts behind one server"
)
_ELSEWHERE = {"--headless": _ONE_SERVER_PER_HOST, "--data-parallel-start-rank": _ONE_SERVER_PER_HOST}  # vLLM's flags


class BooleanWithValue(argparse.BooleanOptionalAction):
    """`--name`, `--no-name`, and also `--name true` and `--name false`."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that is easier on its users.

    `--foo_bar` is `--foo-bar`. `--flag=true` and `--flag=false` work for flags. `--a.b.c value` builds the JSON object
    of `--a`, `--a.b+ x,y` adds to a list in it; the last of several values counts, and the log names the others.
    `--config file.yaml` gives values for flags that the command line does not mention. `-O3` is `-O.level 3`.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if args is None:
            import sys

            args = sys.argv[1:]
        words = list(args)
        if self._subparsers is None:  # a parser with commands leaves its words to them
            words, rest = self._split(words)
            words = self._with_config_file([self._spelled(word) for word in words] + rest)
            words = self._join_flags(self._join_dotted(self._with_levels(words)))
        return super().parse_known_args(words, namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hints = "".join(dict.fromkeys(self._near(word) for word in unknown if word.startswith("-")))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
        return found

    def error(self, message: str) -> NoReturn:
        """End the program with status 2: the message alone, where a usage of hundreds of flags would hide it."""
        if len(self._actions) <= _SHORT_USAGE:
            super().error(message)
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains all flags.\n")

    def _near(self, word: str) -> str:
        key = word.partition("=")[0].replace("_", "-")
        if key in _ELSEWHERE:
            return f". Here, {_ELSEWHERE[key]}"
        near = difflib.get_close_matches(key, self._all_options(), n=3, cutoff=0.6)
        return f". Did you mean {' or '.join(near)}?" if near else ""

    def _all_options(self) -> list[str]:
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    options.extend(parser._option_string_actions)
        return options

    # ---- spelling ------------------------------------------------------------------------------------------------

    def _spelled(self, word: str) -> str:
        """`word` with its option spelled as it was declared."""
        if not word.startswith("--") or len(word) == 2:
            return word
        key, equals, value = word.partition("=")
        first, dot, rest = key.partition(".")
        for candidate in (first, first.replace("_", "-"), first.replace("-", "_").replace("__", "--", 1)):
            if candidate in self._option_string_actions:
                return candidate + dot + rest + equals + value
        return first.replace("_", "-") + dot + rest + equals + value

    def _action_of(self, word: str) -> argparse.Action | None:
        """The action of an option word (also abbreviated), None if it is no option."""
        key = word.partition("=")[0]
        for option in (key, key.partition(".")[0]):
            if option in self._option_string_actions:
                return self._option_string_actions[option]
        if not key.startswith("--") or len(key) == 2 or not self.allow_abbrev:
            return None
        matches = {id(a): a for option, a in self._option_string_actions.items() if option.startswith(key)}
        return next(iter(matches.values())) if len(matches) == 1 else None

    def _split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """The words up to a lone `--`, and the rest."""
        end = words.index("--") if "--" in words else len(words)
        return words[:end], words[end:]

    # ---- flags ---------------------------------------------------------------------------------------------------

    def _join_flags(self, words: list[str]) -> list[str]:
        """`--flag=true` as `--flag`, `--flag=false` as `--no-flag`; BooleanWithValue also takes the next word."""
        words, rest = self._split(words)
        result = []
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            key, equals, value = word.partition("=")
            action = self._option_string_actions.get(key)
            if not isinstance(action, _FLAG_ACTIONS):
                result.append(word)
                continue
            if not equals and isinstance(action, BooleanWithValue) and position < len(words):
                following = words[position].lower()
                if following in ("true", "false"):
                    equals, value = "=", following
                    position += 1
            result.extend(self._flag(action, key, value) if equals else [word])
        return result + rest

    def _flag(self, action: argparse.Action, key: str, value: str) -> list[str]:
        """The words that set the flag `key` to `value`."""
        word = value.strip().lower()
        if word not in _TRUE + _FALSE:
            self.error(f"argument {key}: expected true or false, got {value!r}")
        if word in _TRUE:
            return [key]
        if not isinstance(action, argparse.BooleanOptionalAction):
            return []  # a flag without a negative form: not giving it is false
        if key.startswith("--no-"):
            return ["--" + key[len("--no-") :]]
        return ["--no-" + key.removeprefix("--")]

    # ---- dotted keys ---------------------------------------------------------------------------------------------

    def _with_levels(self, words: list[str]) -> list[str]:
        """`-O3`, `-O=3` and `-O 3` as `-O.level 3`, where the parser has an option `-O`."""
        if "-O" not in self._option_string_actions:
            return words
        result: list[str] = []
        for word in words:
            if result and result[-1] == "-O" and word.isdecimal():
                result[-1:] = ["-O.level", word]
            elif word.startswith("-O") and word[2:].removeprefix("=").isdecimal():
                result += ["-O.level", word[2:].removeprefix("=")]
            else:
                result.append(word)
        return result

    def _join_dotted(self, words: list[str]) -> list[str]:
        """`--a.b 1 --a.c.d x` as `--a={"b": 1, "c": {"d": "x"}}`, laid over a `--a={...}` that is given too.

        `--a.b+ x,y` adds "x" and "y" to the list `b`.
        """
        words, rest = self._split(words)
        result: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        repeated: list[str] = []
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            key, equals, value = word.partition("=")
            option, dot, path = key.partition(".")
            is_dotted = dot and option.startswith("-") and key not in self._option_string_actions
            if not is_dotted or option not in self._option_string_actions:
                result.append(word)
                continue
            option = max(self._option_string_actions[option].option_strings, key=len)
            if not equals:
                if position == len(words):
                    self.error(f"argument {key}: expected a value")
                value = words[position]
                position += 1
            target = objects.setdefault(option, {})
            if path.endswith("+"):
                _add_to_list(target, path[:-1].split("."), value.split(","), key, self)
            elif _set_path(target, path.split("."), _value_of(value), key, self):
                repeated.append(key)
        if repeated:
            logger.warning("Found duplicate keys %s: the last value of each counts.", ", ".join(sorted(set(repeated))))
        for option, changes in objects.items():
            result = self._merge_json(result, option, changes)
        return result + rest

    def _merge_json(self, words: list[str], option: str, changes: dict[str, Any]) -> list[str]:
        """`words` with a JSON object for `option`: the one that is there already (last), changed."""
        action = self._option_string_actions[option]
        kept: list[str] = []
        base: dict[str, Any] = {}
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            key, equals, value = word.partition("=")
            if self._option_string_actions.get(key) is not action:
                kept.append(word)
                continue
            if not equals and position < len(words):
                value = words[position]
                position += 1
            given = _value_of(value)
            if not isinstance(given, dict):
                self.error(f"argument {option}: give either a value or dotted keys such as {option}.key, not both")
            base = given
        return [*kept, f"{option}={json.dumps(_deep_merge(base, changes))}"]

    # ---- config file ---------------------------------------------------------------------------------------------

    def _with_config_file(self, words: list[str]) -> list[str]:
        """`words` without `--config FILE`, followed by the file's values for options that `words` do not mention."""
        words, rest = self._split(words)
        kept: list[str] = []
        file: str | None = None
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if word != "--config" and not word.startswith("--config="):
                kept.append(word)
                continue
            if file is not None:
                self.error("More than one config file specified: give --config once.")
            _, equals, file = word.partition("=")
            if not equals:
                if position == len(words):
                    self.error("No config file specified after --config: give the path of a YAML file.")
                file = words[position]
                position += 1
        if file is None:
            return words + rest
        options = self._words_of_file(Path(file), {id(self._action_of(word)) for word in kept})
        config_option = [f"--config={file}"] if "--config" in self._option_string_actions else []
        return [*kept, *config_option, *options, *rest]

    def _words_of_file(self, file: Path, mentioned: set[int]) -> list[str]:
        words: list[str] = []
        for key, value in _read_yaml(file, self).items():
            option = self._spelled("--" + str(key).removeprefix("--"))
            action = self._option_string_actions.get(option.partition(".")[0])
            if action is None:
                self.error(f"{file}: unknown option {key!r}{self._near(option)}")
            if action.dest == "config":
                self.error(f"{file}: a config file cannot name another one")
            if id(action) not in mentioned and value is not None:
                words.extend(self._words_of_value(option, action, value))
        return words

    def _words_of_value(self, option: str, action: argparse.Action, value: Any) -> Iterator[str]:
        """The command line words for one entry of a config file."""
        if isinstance(action, _FLAG_ACTIONS):
            if not isinstance(value, bool):
                self.error(f"config file: {option} must be true or false, got {value!r}")
            yield f"{option}={str(value).lower()}"
        elif isinstance(value, dict):
            yield f"{option}={json.dumps(value)}"
        elif isinstance(value, list) and isinstance(action, argparse._AppendAction):
            for item in value:
                yield f"{option}={_plain(item)}"
        elif isinstance(value, list) and action.nargs not in (None, "?"):
            yield option
            yield from (_plain(item) for item in value)
        elif isinstance(value, list):
            yield f"{option}={json.dumps(value)}"
        elif action.nargs in ("+", "*"):
            yield from (option, _plain(value))
        else:
            yield f"{option}={_plain(value)}"


def _plain(value: Any) -> str:
    """A YAML value as a command line word."""
    if isinstance(value, str):
        return value
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)


def _value_of(text: str) -> Any:
    """JSON if it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parent(target: dict[str, Any], path: list[str], key: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The object in `target` that holds the last name of `path`, made where it is missing."""
    if not all(path):
        parser.error(f"argument {key}: empty name between dots")
    for name in path[:-1]:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            parser.error(f"argument {key}: {name!r} already has a value that is no object")
    return target


def _set_path(target: dict[str, Any], path: list[str], value: Any, key: str, parser: argparse.ArgumentParser) -> bool:
    """Set the value at `path`; whether it replaces one that was given before."""
    target, name = _parent(target, path, key, parser), path[-1]
    old = target.get(name)
    if isinstance(value, dict) and isinstance(old, dict):
        target[name] = _deep_merge(old, value)
        return False
    replaces = name in target
    target[name] = value
    return replaces


def _add_to_list(
    target: dict[str, Any], path: list[str], values: list[str], key: str, parser: argparse.ArgumentParser
) -> None:
    found = _parent(target, path, key, parser).setdefault(path[-1], [])
    if not isinstance(found, list):
        parser.error(f"argument {key}: {path[-1]!r} already has a value that is no list")
    found += [_value_of(value) for value in values]


def _deep_merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _read_yaml(file: Path, parser: argparse.ArgumentParser) -> dict[Any, Any]:
    """The mapping in a YAML file. Ends the program with a clear error if it is anything else."""
    import yaml

    if file.suffix not in (".yaml", ".yml"):
        parser.error(f"Config file must be of a yaml/yml type. {str(file)!r} supplied")
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            parser.error(f"{file}: a config file may have at most {_MAX_CONFIG_BYTES} bytes")
        text = file.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            parser.error(f"{file}: YAML aliases (*name) are not supported in a config file")
        document = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        parser.error(f"{file}: cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        parser.error(f"{file}: is not UTF-8 text")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        parser.error(f"{file}: is not valid YAML: {' '.join(str(error).split())}")
    if document is None:
        return {}
    if not isinstance(document, dict):
        parser.error(f"{file}: expected `option: value` lines, got a {type(document).__name__}")
    _refuse_duplicates(root, file, parser)
    return document


def _refuse_duplicates(root: Any, file: Path, parser: argparse.ArgumentParser) -> None:
    seen: set[str] = set()
    for key, _ in root.value:
        name = str(key.value).replace("_", "-")
        if name in seen:
            parser.error(f"{file}: option {key.value!r} is there twice")
        seen.add(name)
