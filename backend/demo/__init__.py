"""The demo pair: a small Python-writing target and its EAGLE-3 drafter, and how they are trained.

Owns the locations of the two packaged models.  Importing this package does not import torch; the training
code lives in `backend.demo.train` and the modules below it.
"""

from pathlib import Path
from typing import Final

TARGET_DIR: Final[Path] = Path(__file__).resolve().parent / "models" / "target"
DRAFTER_DIR: Final[Path] = Path(__file__).resolve().parent / "models" / "drafter"

__all__ = ["DRAFTER_DIR", "TARGET_DIR"]
