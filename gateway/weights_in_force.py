"""The newest weights of the target in the fleet; updates verifiers that have missed them.  Runs in the gateway's event loop."""

from __future__ import annotations

import asyncio
import logging

from backend.fleet.stats import Weights
from gateway.engine_link import UtilityError, VerifierLink

logger = logging.getLogger(__name__)


class WeightsInForce:
    """The newest weights that any verifier was given for the whole fleet."""

    def __init__(self) -> None:
        self.newest = Weights()
        self._last_number = 0
        # Verifiers that were behind, with the weights that they were asked to load and the task that waits for the answer.
        self._asked: dict[VerifierLink, tuple[Weights, asyncio.Task[None]]] = {}

    def next_number(self) -> int:
        """A number for a new update.  Two updates at once get different numbers, even before a verifier has loaded either."""
        self._last_number = max(self._last_number, self.newest.update) + 1
        return self._last_number

    def is_behind(self, link: VerifierLink) -> bool:
        """Whether the verifier has not loaded the fleet's last update."""
        return link.weights.update < self.newest.update

    def compare(self, link: VerifierLink) -> None:
        """Has a verifier load the newest weights if it is behind, because it was restarted or away during an update."""
        if link.weights.update > self.newest.update:
            self.newest = link.weights
        elif self.is_behind(link) and self.newest.path and self._asked.get(link, (None,))[0] != self.newest:
            self._asked[link] = self.newest, asyncio.create_task(_catch_up(link, self.newest))

    def gone(self, link: VerifierLink) -> None:
        self._asked.pop(link, None)


async def _catch_up(link: VerifierLink, weights: Weights) -> None:
    try:
        await link.call("catch_up", weights.path, weights.version, weights.update)
    except UtilityError as error:
        logger.error("verifier %s stays without requests: weights %s: %s", link.member.id, weights.version, error)
