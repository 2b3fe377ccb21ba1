"""Where settings come from: command line > environment > YAML file > defaults, in that order and key by key.

Pure but for `load`, which reads the file and the environment; runs in the command-line process.  Each source is read into
`{path: Given}`.  Every entry carries the name that the user wrote (`--gateway-port`, `OUTRIDER_GATEWAY__PORT`, `fleet.yaml:
gateway.port`).  So an error can name exactly what to correct, and `check-config` can say where each value came from.
(pydantic-settings merges sources too, but does not keep where a value came from.)
"""

import argparse
import difflib
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from backend.config import environment
from backend.config.settings import Settings

KeyPath = tuple[str, ...]
Say = Callable[[str], None]
"""Shows the user one line of progress."""

ALIASES = {
    "--host": ("gateway", "host"),
    "--port": ("gateway", "port"),
    "--api-key": ("gateway", "api_key"),
    "--gateways": ("gateway", "processes"),
}
SECRETS = frozenset({("gateway", "api_key"), ("gateway", "admin_key")})
CONFIG_VARIABLE = environment.PREFIX + "CONFIG"
DEFAULT = "default"


class ConfigError(Exception):
    """A setting is wrong.  The message is one line that names the key as the user wrote it."""


class CommandError(Exception):
    """A command failed at run time; the message is one line."""


@dataclass(frozen=True)
class Given:
    """One value, and the flag, variable or key that it came from."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Loaded:
    """The settings and the origin of every value that is not a default."""

    settings: Settings
    origins: dict[KeyPath, str]


def leaves(model: type[BaseModel] = Settings, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every setting with its path, in the order of definition."""
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from leaves(section, (*prefix, name))
        else:
            yield (*prefix, name), info


def flag(path: KeyPath) -> str:
    """`("gateway", "drain_s")` -> `--gateway-drain-s`."""
    return "--" + "-".join(path).replace("_", "-")


def variable(path: KeyPath) -> str:
    """`("gateway", "drain_s")` -> `OUTRIDER_GATEWAY__DRAIN_S`."""
    return environment.PREFIX + "__".join(path).upper()


def load(arguments: Sequence[str], program: str = "outrider serve", description: str = "") -> Loaded:
    """Settings from all sources.  Raises `ConfigError`; prints help and exits on `--help`."""
    from_flags, config = read_flags(arguments, program, description)
    variables = environment.outrider_variables()
    named_there = variables.pop(CONFIG_VARIABLE, None)
    config = config or named_there
    from_file = read_yaml(Path(config)) if config else {}
    return merge([from_flags, read_variables(variables), from_file])


def merge(sources: Sequence[Mapping[KeyPath, Given]]) -> Loaded:
    """Settings from sources, the one with the highest precedence first.  Raises `ConfigError`."""
    chosen: dict[KeyPath, Given] = {}
    for source in reversed(sources):
        chosen.update(source)
    tree: dict[str, Any] = {}
    for path, given in chosen.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = given.value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, chosen)) from error
    return Loaded(settings, {path: given.origin for path, given in chosen.items()})


# Command line.


class Parser(argparse.ArgumentParser):
    """A parser that raises `ConfigError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError`."""
        raise ConfigError(message)


def parser(program: str, description: str = "") -> argparse.ArgumentParser:
    """The command line's parser, one flag per setting, sections as groups of the help text."""
    result = Parser(prog=program, description=description, allow_abbrev=False)
    result.add_argument("--config", metavar="FILE", help="YAML file with settings")
    groups: dict[KeyPath, Any] = {(): result.add_argument_group("fleet")}
    short = {path: alias for alias, path in ALIASES.items()}
    for path, info in leaves():
        section = path[:-1]
        if section not in groups:
            groups[section] = result.add_argument_group(".".join(section))
        names = [*([short[path]] if path in short else []), flag(path)]
        optional: dict[str, Any] = {"nargs": "?", "const": "true"} if bool in _types(info) else {}
        groups[section].add_argument(
            *names, dest=".".join(path), default=argparse.SUPPRESS, metavar=_metavar(info), help=_help(info), **optional
        )
    return result


def read_flags(arguments: Sequence[str], program: str, description: str = "") -> tuple[dict[KeyPath, Given], str | None]:
    """The settings given as flags, and the `--config` file."""
    found, unknown = parser(program, description).parse_known_args(list(arguments))
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.startswith("-"):
            raise ConfigError(f"unexpected argument {name!r}: settings are given as --name value")
        known = ["--config", *ALIASES, *(flag(path) for path, _ in leaves())]
        raise ConfigError(f"unknown flag {name}{nearest(name, known)}")
    values = vars(found)
    config = values.pop("config")
    fields = dict(leaves())
    result = {}
    for dotted, text in values.items():
        path = tuple(dotted.split("."))
        result[path] = _given(text, path, fields[path], flag(path))
    return result, config


def at_least(least: int) -> Callable[[str], int]:
    """An `argparse` type: whole numbers of `least` or more; the error for a smaller one names the limit."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: {least} is the least")
        return value

    return read


# Environment.


def read_variables(variables: Mapping[str, str]) -> dict[KeyPath, Given]:
    """The settings given as `OUTRIDER_*` variables."""
    known = {variable(path): (path, info) for path, info in leaves()}
    result = {}
    for name, text in variables.items():
        if name not in known:
            raise ConfigError(f"unknown environment variable {name}{nearest(name, [*known, CONFIG_VARIABLE])}")
        path, info = known[name]
        result[path] = _given(text, path, info, name)
    return result


# YAML.


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, as YAML does; PyYAML forgets the first one.

    Dates are text: no setting is one, and lm-format-enforcer, once imported, changes how PyYAML reads dates everywhere.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                # A mark would show a piece of the file.
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice (line {key.start_mark.line + 1})"
                )
            names.append(key.value)
        return super().construct_mapping(node, deep)


def read_yaml_text(text: str) -> object:
    """What `text` says.  Raises `yaml.YAMLError`, or ValueError for a value that its own tag does not allow."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(file: Path) -> dict[KeyPath, Given]:
    """The settings given in a YAML file."""
    try:
        tree = read_yaml_text(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    return {} if tree is None else dict(_flattened(tree, (), file))


def _flattened(tree: Any, path: KeyPath, file: Path) -> Iterator[tuple[KeyPath, Given]]:
    known = [leaf for leaf, _ in leaves()]
    if path in known:
        origin = f"{file}: {'.'.join(path)}"
        yield path, Given(_secret(tree, path, origin) or tree, origin)
        return
    if not isinstance(tree, dict):
        where = f"{file}: {'.'.join(path)}" if path else str(file)
        raise ConfigError(f"{where}: expected a mapping of settings")
    for key, value in tree.items():
        inner = (*path, str(key))
        if not any(leaf[: len(inner)] == inner for leaf in known):
            names = {".".join(leaf[:depth]) for leaf in known for depth in (1, 2)}
            raise ConfigError(f"{file}: unknown key {'.'.join(inner)}{nearest('.'.join(inner), sorted(names))}")
        yield from _flattened(value, inner, file)


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of an error message about an unknown name; empty if no known name is like it."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


# Details.


def _types(info: FieldInfo) -> tuple[Any, ...]:
    if typing.get_origin(info.annotation) in (typing.Union, types.UnionType):
        return typing.get_args(info.annotation)
    return (info.annotation,)


def _given(text: str, path: KeyPath, info: FieldInfo, origin: str) -> Given:
    """A value that was given as text."""
    if secret := _secret(text, path, origin):
        return Given(secret, origin)
    kinds = _types(info)
    if type(None) in kinds and text.lower() in {"none", "null", ""}:
        return Given(None, origin)
    if any(typing.get_origin(kind) is dict for kind in kinds):
        try:
            return Given(json.loads(text), origin)
        except ValueError as error:
            raise ConfigError(f"{origin}: expected JSON, such as '{{\"key\": 1}}': {error}") from error
    return Given(text, origin)


def _secret(value: Any, path: KeyPath, origin: str) -> str | None:
    """A secret that was given as `@FILE`, since everyone on the machine can read flags; None: not given so."""
    if path not in SECRETS or not isinstance(value, str) or not value.startswith("@"):
        return None
    try:
        found = Path(value[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{origin}: {value[1:]} cannot be read") from error
    if not found:
        raise ConfigError(f"{origin}: {value[1:]} is empty")
    return found


def _metavar(info: FieldInfo) -> str:
    for kind in _types(info):
        if typing.get_origin(kind) is typing.Literal:
            return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        if typing.get_origin(kind) is dict:
            return "JSON"
        if isinstance(kind, type) and kind is not type(None):
            return {"bool": "BOOL", "int": "N", "float": "X"}.get(kind.__name__, "TEXT")
    return "TEXT"


def _help(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    shown = "" if default is None or default in ({}, []) else f" [{default}]"
    return ((info.description or "") + shown).replace("%", "%%")


def _explain(error: ValidationError, chosen: Mapping[KeyPath, Given]) -> str:
    first = error.errors()[0]
    full = tuple(str(part) for part in first["loc"])
    path = next((full[:n] for n in range(len(full), 0, -1) if full[:n] in chosen), full)
    message = first["msg"][:1].lower() + first["msg"][1:]
    if path not in chosen:
        return f"{'.'.join(full)}: {message}"
    shown = "***" if path in SECRETS else repr(chosen[path].value)
    return f"{chosen[path].origin}: {message}, not {shown}"
