"""The speculative backend: coordinator, verifiers, drafters and the wire between them."""
