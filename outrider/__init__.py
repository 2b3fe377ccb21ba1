"""Outrider from Python: `with Fleet(model=...) as fleet` starts one, `Fleet.join(url)` joins one."""

from outrider.asynchronous import AsyncFleet
from outrider.synchronous import Fleet
from outrider.types import Episode, OutriderError, Sample, WeightSpan

__all__ = ["AsyncFleet", "Episode", "Fleet", "OutriderError", "Sample", "WeightSpan"]
