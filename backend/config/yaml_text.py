"""Reads the YAML of settings and keys.  Pure."""

from __future__ import annotations

import yaml

_DATE = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Dates are text: no setting is one, and lm-format-enforcer, once imported, changes how PyYAML reads dates everywhere."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml_text(text: str) -> object:
    """What `text` says.  Raises `yaml.YAMLError`, or ValueError for a value that its own tag does not allow."""
    return yaml.load(text, Loader=_Loader)
