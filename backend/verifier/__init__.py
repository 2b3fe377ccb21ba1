"""The verifier: vLLM's engine core with our scheduler and model-runner mixin, behind a ZeroMQ socket."""
