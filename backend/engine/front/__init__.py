"""The gateway's half of vLLM.  Every name of vLLM that the gateway uses is imported here.

vLLM's front end renders prompts, checks parameters, detokenizes and builds OpenAI's answers.  `client.py` has vLLM's engine
client without an engine, `serving.py` vLLM's serving objects, `config.py` their configuration.  An upgrade of vLLM begins here
and in `tests/unit/backend/engine/test_gateway_contract.py`.
"""

import vllm  # first, also for the modules of this package: its submodules do not import alone
from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import decode_custom_tool_input_prefix
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest, GenerateTokensResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError, VLLMNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

from backend.engine.front.responses import ResponseRequest

VLLM_VERSION: str = vllm.__version__
