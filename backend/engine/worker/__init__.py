"""What runs in a verifier's worker process: vLLM's worker and model runner with our mixins, and our sampler."""
