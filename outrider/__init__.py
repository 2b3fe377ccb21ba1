"""Outrider's Python API: `with Fleet(model=...) as fleet` starts a fleet, `Fleet.join(url)` joins a running one."""

from outrider.asynchronous import AsyncFleet
from outrider.synchronous import Fleet
from outrider.types import Episode, OutriderError, Sample, WeightSpan

__all__ = ["AsyncFleet", "Episode", "Fleet", "OutriderError", "Sample", "WeightSpan"]
