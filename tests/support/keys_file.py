"""A keys file that a test writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.auth.key_ring import make_key


class Keys:
    """Keys by name, and the file that has them."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.yaml"
        self._entries: dict[str, str] = {}
        self._keys: dict[str, str] = {}

    def put(self, name: str, **fields: Any) -> dict[str, str]:
        """Writes a key with these fields; returns the headers that present it."""
        if name not in self._keys:
            self._keys[name], self._entries[name] = make_key(name)
        entry = self._entries[name] + "".join(f"    {field}: {json.dumps(value)}\n" for field, value in fields.items())
        self._entries[name] = entry
        self.file.write_text("keys:\n" + "".join(self._entries.values()))
        return {"authorization": f"Bearer {self._keys[name]}"}
