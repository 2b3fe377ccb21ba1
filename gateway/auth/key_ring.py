"""All keys: those of the keys file, which has only hashes, and the two single keys of the settings.  Makes new keys, too.

A key has 256 random bits and cannot be guessed, so one round of SHA-256 hides it.  Keys are looked up by their hash, so the
time of a look-up reveals nothing about other keys.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.datastructures import Headers
from starlette.types import Scope

from backend.config.sources import ConfigError, read_yaml_text
from gateway.auth.caller import ANYBODY, Caller, Priority

PREFIX = "or-"
RESERVED = frozenset({"admin-key", "anybody", "api-key", "nobody"})
"""Names of callers in logs and counts that no entry of the keys file may have."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")


class KeyFileError(ConfigError):
    """The keys file is wrong.  The message is one line that tells where; it contains no hashes."""


class KeyEntry(BaseModel):
    """The entry of one key in the keys file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str | list[str]
    """Hash of the key, or hashes of two keys while one replaces the other."""
    models: list[str] | None = None
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent_requests: int | None = Field(None, ge=1)
    weight: float = Field(1.0, gt=0, le=1000)
    priority: Literal["high", "interactive", "batch"] = "interactive"
    rights: list[Literal["admin", "metrics"]] = []
    learn: bool = True
    """Whether drafters may learn from its requests."""

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("expected up to 64 letters, digits, dots, dashes, underscores or @")
        if value in RESERVED:
            raise ValueError("this name is the server's own")
        return value

    @field_validator("sha256")
    @classmethod
    def _hex(cls, value: str | list[str]) -> list[str]:
        hashes = [value] if isinstance(value, str) else value
        if not hashes or not all(_HASH.fullmatch(each) for each in hashes):
            raise ValueError("expected 64 lower-case hexadecimal digits, as `outrider make-key` prints them")
        return hashes

    def caller(self) -> Caller:
        models = None if self.models is None else frozenset(self.models)
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        priority = Priority[self.priority.upper()]
        admin, metrics = "admin" in self.rights, "metrics" in self.rights
        return Caller(self.name, self.name, models, *limits, self.weight, priority, admin, metrics, self.learn)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: list[KeyEntry]


def read_entries(path: str | Path | None) -> list[KeyEntry]:
    """The entries of a keys file; of none, none.  Raises `KeyFileError`."""
    if not path:
        return []
    try:
        tree = read_yaml_text(Path(path).read_text(encoding="utf-8"))
        entries = _File.model_validate(tree).keys
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise KeyFileError(f"{path}: {_explain(error, tree)}") from None
    except (yaml.YAMLError, ValueError):
        # The parser's own message would show a piece of the file.  An impossible `!!timestamp` is a ValueError.
        raise KeyFileError(f"{path}: not YAML") from None
    names = [each.name for each in entries]
    hashes = [each for entry in entries for each in entry.sha256]
    for kind, values in (("name", names), ("key", hashes)):
        if len(set(values)) < len(values):
            twice = next(index for index, value in enumerate(values) if value in values[:index])
            what = f" {values[twice]}" if kind == "name" else ""
            raise KeyFileError(f"{path}: the {kind}{what} is there twice")
    return entries


def _explain(error: ValidationError, tree: object) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function-"))) or "the file"
    at = first["loc"][1] if len(first["loc"]) > 1 else None
    if isinstance(at, int) and isinstance(tree, dict):
        name = tree["keys"][at].get("name") if isinstance(tree["keys"][at], dict) else None
        where += f" ({name})" if isinstance(name, str) and _NAME.fullmatch(name) else ""
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}"


class KeyRing:
    """Every valid key, with its caller.  Immutable; a reload makes a new ring."""

    def __init__(self, api_key: str | None = None, admin_key: str | None = None, entries: Iterable[KeyEntry] = ()) -> None:
        self._callers: dict[bytes, Caller] = {}
        for entry in entries:
            self._callers |= dict.fromkeys(map(bytes.fromhex, entry.sha256), entry.caller())
        if api_key is not None:
            self._callers[_digest(api_key)] = Caller("api-key")
        self._administrators = {digest: caller for digest, caller in self._callers.items() if caller.admin}
        if admin_key is not None:
            self._administrators[_digest(admin_key)] = Caller("admin-key", admin=True, metrics=True)
        self.open = not self._callers
        """Whether the API needs no key."""
        self.has_admin = bool(self._administrators)
        """Whether administration requires a key with that right."""
        self.guards_metrics = any(caller.metrics for caller in self._callers.values())

    def of_owner(self, owner: str) -> Caller | None:
        """The caller with this owner; None: the key no longer exists."""
        if not owner:
            return ANYBODY
        return next((caller for caller in self._callers.values() if caller.owner == owner), None)

    def find(self, scope: Scope) -> Caller | None:
        """The caller by the request's key; `ANYBODY` where no key is needed; None: the key is missing or wrong."""
        return ANYBODY if self.open else self._callers.get(_shown(scope))

    def find_administrator(self, scope: Scope) -> Caller | None:
        """The caller, if the request's key may administer the fleet."""
        return self._administrators.get(_shown(scope))


def _shown(scope: Scope) -> bytes:
    """The hash of the request's key, from `Authorization: Bearer` or, as Anthropic's clients send it, from `X-Api-Key`.

    Empty without a key, so that a key that was set to nothing opens nothing.
    """
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()
    return _digest(key) if key else b""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def make_key(name: str) -> tuple[str, str]:
    """A new key, and its entry for the keys file.  Raises `KeyFileError` for an invalid name."""
    if not _NAME.fullmatch(name):
        raise KeyFileError("a key's name has up to 64 letters, digits, dots, dashes, underscores or @")
    if name in RESERVED:
        raise KeyFileError(f"{name} is a name of the server's own")
    key = PREFIX + secrets.token_urlsafe(32)
    return key, f"  - name: {name}\n    sha256: {_digest(key).hex()}\n"
