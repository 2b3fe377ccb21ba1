"""Bodies of requests: read, bounded, and put into the words of vLLM's request models."""
