"""The OpenAI-compatible HTTP gateway over a speculating fleet."""
