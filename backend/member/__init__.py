"""How verifiers and drafters join the fleet, stay in it, and leave it."""
