"""Which requests go to the verifiers now, which wait, and which are turned away."""
