"""Directories of the built-in models: a small target that writes Python, its EAGLE-3 and DFlash heads, and a draft model.

`backend/lab/demo/` has the code that trained them.
"""

from pathlib import Path
from typing import Final

TARGET_DIR: Final[Path] = Path(__file__).resolve().parent / "target"
DRAFTER_DIR: Final[Path] = Path(__file__).resolve().parent / "drafter"
DFLASH_DIR: Final[Path] = Path(__file__).resolve().parent / "dflash"
DRAFT_MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "draft-model"
