"""Settings: their types (`settings.py`), where they come from (`sources.py`) and the process environment (`environment.py`)."""

from backend.config.settings import REMOTE_MODES, DraftingSettings, RecordsSettings, Settings
