# ruff: noqa: E402, F401, I001
"""Imports the modules that engines need, once, in the process that all test engines are forked from.  Tests only.

If another version of vLLM lacks one of them, the fork server ignores the error, and engines import what they need themselves.
"""

import atexit
import gc

# Imported objects are never garbage, here or in forked processes, so the collector must not scan them.
gc.disable()

import vllm  # must be the first of vLLM's modules

import vllm.v1.worker.cpu_worker  # before all that binds what it replaces

import backend.drafter.process
import backend.verifier.process
import backend.engine.worker.cpu_worker
import torch._dynamo.convert_frame
import torch._inductor.compile_fx
import vllm.lora.lora_model
import vllm.model_executor.model_loader
import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.core
import vllm.v1.structured_output.backend_xgrammar

gc.enable()
gc.freeze()
# Some libraries report objects that are not collected by the end of the process.
atexit.register(gc.unfreeze)
