"""Where the built-in pair lies: a small target that writes Python, and its EAGLE-3 drafter (made by `backend/lab/demo/`)."""

from pathlib import Path
from typing import Final

TARGET_DIR: Final[Path] = Path(__file__).resolve().parent / "target"
DRAFTER_DIR: Final[Path] = Path(__file__).resolve().parent / "drafter"

__all__ = ["DRAFTER_DIR", "TARGET_DIR"]
