"""Settings: their types (`settings.py`), where they come from (`sources.py`) and the process environment (`environment.py`)."""

from backend.config.settings import (
    CoordinatorSettings,
    DraftingSettings,
    GatewaySettings,
    RaySettings,
    Settings,
    TransportSettings,
    VerifierSettings,
)

__all__ = [
    "CoordinatorSettings",
    "DraftingSettings",
    "GatewaySettings",
    "RaySettings",
    "Settings",
    "TransportSettings",
    "VerifierSettings",
]
