"""The coordinator: who is in the fleet and which drafter serves which verifier.

`policy.py` decides, `actor.py` is the Ray actor around it and the handle members talk to it through, `messages.py` is what
the two exchange.
"""

from backend.coordinator.messages import CoordinatorUnavailable, FleetInfo

__all__ = ["CoordinatorUnavailable", "FleetInfo"]
