"""The verifier: vLLM's engine core with our scheduler and model-runner mixins, behind a ZeroMQ socket."""
