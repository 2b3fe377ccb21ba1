"""The coordinator: keeps the fleet's members, and assigns drafters to verifiers.

`policy.py` decides, `actor.py` has the Ray actor around it and the handle through which members call it, and `messages.py` has
what all of a fleet know of it.
"""

from backend.coordinator.messages import CoordinatorUnavailable, FleetInfo
