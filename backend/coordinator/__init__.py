"""The coordinator: keeps the fleet's members, and assigns drafters to verifiers.

`policy.py` decides, `actor.py` has the Ray actor around it and the handle through which members call it, and `messages.py` has
the messages between the two.
"""

from backend.coordinator.messages import CoordinatorUnavailable, FleetInfo
