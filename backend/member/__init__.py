"""How a process becomes a member of the fleet, stays one, and leaves: what verifiers and drafters have in common."""
