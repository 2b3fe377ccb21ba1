"""The newest weights of the target in the fleet; updates verifiers that have missed them.  Runs in the gateway's event loop."""

import asyncio
import logging

from backend.fleet.stats import Weights
from gateway.fleet.engine_link import UtilityError, VerifierLink

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Seconds after which a verifier that could not load the newest weights is asked again: its own may have slept, say."""


class WeightsInForce:
    """The newest weights that any verifier was given for the whole fleet."""

    def __init__(self) -> None:
        self.newest = Weights()
        self._last_number = 0
        self._reported: dict[VerifierLink, Weights] = {}
        self._away: dict[str, tuple[str, Weights]] = {}
        """By member: the incarnation that was lost last, and what it had reported."""
        # Verifiers that were behind, and which weights they were asked to load.
        self._requested: dict[VerifierLink, tuple[Weights, asyncio.Task[None]]] = {}

    def next_number(self) -> int:
        """The number of the next update.  Two updates under way at once get different numbers."""
        self._last_number += 1
        return self._last_number

    def is_behind(self, link: VerifierLink) -> bool:
        """Whether the verifier has not loaded the fleet's last update."""
        return link.weights.update < self.newest.update

    def compare(self, link: VerifierLink) -> None:
        """One that was started anew, or was away during an update, loads what the others have before it is given requests.

        Newest weights that no verifier has any more, and none can load, are in force no longer: an update has failed
        everywhere, and the verifiers went back to earlier ones.
        """
        incarnation, had = self._away.pop(link.member.id, ("", link.weights))
        # A process that was lost for a moment, during an update say, is the same one when it comes back.
        known = had if incarnation == link.member.incarnation else link.weights
        before, self._reported[link] = self._reported.get(link, known), link.weights
        self._last_number = max(self._last_number, link.weights.update)
        went_back = link.weights.update < before.update
        if went_back and not self.newest.path and all(each.update < self.newest.update for each in self._reported.values()):
            self.newest = max(self._reported.values(), key=lambda each: each.update)
        if link.weights.update > self.newest.update:
            self.newest = link.weights
        elif self.is_behind(link) and self.newest.path and self._requested.get(link, (None,))[0] != self.newest:
            self._requested[link] = self.newest, asyncio.create_task(self._catch_up(link, self.newest))

    def gone(self, link: VerifierLink) -> None:
        self._requested.pop(link, None)
        if (reported := self._reported.pop(link, None)) is not None:
            self._away[link.member.id] = link.member.incarnation, reported

    async def _catch_up(self, link: VerifierLink, weights: Weights) -> None:
        try:
            await link.call("catch_up", weights.path, weights.version, weights.update)
        except UtilityError as error:
            logger.error("verifier %s gets no requests until it has weights %s: %s", link.member.id, weights.version, error)
            await asyncio.sleep(RETRY_S)
            if self._requested.get(link, (None,))[0] is weights:
                # Its next report asks again.
                del self._requested[link]
