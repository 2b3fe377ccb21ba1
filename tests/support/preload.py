# ruff: noqa: E402, F401, I001
"""What an engine imports, loaded once in the process that all test engines are forked from.  Tests only.

A module of vLLM's that is gone under another version is loaded when it is needed, as if it did not stand here.
"""

import atexit
import gc

# Nothing of what is imported is garbage, neither here nor in what is forked from here.
gc.disable()

import vllm  # must be the first of vLLM's modules

import backend.drafter.process
import backend.verifier.process
import backend.engine.worker
import torch._dynamo.convert_frame
import torch._inductor.compile_fx
import vllm.lora.lora_model
import vllm.model_executor.model_loader
import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.core
import vllm.v1.structured_output.backend_xgrammar
import vllm.v1.worker.cpu_worker

gc.enable()
gc.freeze()
# Libraries complain at the end of the process about what is never collected.
atexit.register(gc.unfreeze)
