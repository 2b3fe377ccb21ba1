"""Every error that a client can get, and `translate`, which makes them from the exceptions of libraries.

    ApiError                     {"error": {"message", "type", "param", "code"}} and an HTTP status
    |-- BadRequest          400  invalid_request_error
    |   `-- ContextTooLong  400  context_length_exceeded
    |-- Unauthorized        401  invalid_api_key
    |-- Forbidden           403  the key, host name or origin is not allowed to do this
    |-- NotFound            404
    |   `-- ModelNotFound   404  model_not_found
    |-- MethodNotAllowed    405
    |-- RequestTimeout      408  the client took too long to send its request
    |-- Conflict            409  the fleet is not in the state that the command needs; not to be retried as it is
    |-- PayloadTooLarge     413
    |   `-- StorageFull     413  stored files fill the space allowed for them
    |-- UriTooLong          414
    |-- UnsupportedMedia    415
    |-- TooManyRequests     429  with Retry-After
    |   `-- RateLimited     429  a key's own limit
    |-- HeadersTooLarge     431
    `-- ServerError         500
        |-- NotSupported        501  this build of the engine cannot do that
        |-- EngineFailed             a verifier could not do what an administrator asked of its engine
        |-- InternalError            says nothing of what went wrong; the log does
        `-- Unavailable         503  with Retry-After
            |-- NoVerifier           no verifier is ready
            |-- NotAllReady          one of the gateway processes on this port is not ready
            |-- Overloaded           too many requests wait for a verifier, or this one would wait too long
            |-- TooManyConnections   this gateway process has too many connections of clients
            |-- VerifierLost         the verifier of this request was lost, and no other was ready in time
            |-- Poisoned        500  several verifiers were lost while they served this request
            |-- Aborted              an administrator ended this request; of those that write text, the finish reason says so
            |-- NoCoordinator        the coordinator does not answer; only administration needs it
            `-- ShuttingDown         this gateway is going away

`Unavailable` and its subclasses, except `NoCoordinator`, are also raised inside vLLM's request pipeline.  The pipeline lets
exceptions through that derive from `GracefulHTTPError`.
Messages contain no paths, addresses, tracebacks or values of the request beyond field names.
"""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Any, ClassVar

import pydantic
import starlette.exceptions
from fastapi.exceptions import RequestValidationError

from backend.coordinator import CoordinatorUnavailable
from backend.engine import front as vllm
from gateway.requests.vllm_errors import field_of, in_our_words, is_about_all, most_telling, path_of

_VALUE_SUFFIX = re.compile(r" \((?:parameter|value)=.*\)$", re.DOTALL)
_ADDRESS = re.compile(r"\b(?:ipc|tcp|inproc)://\S+|\b0x[0-9a-fA-F]{6,}\b|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_PATH = re.compile(r"(?<![\w/:.])~?/(?:[\w.+@-]+/)+[\w.+@-]*")
_CONTEXT = re.compile(
    r"maximum context length|longer than the maximum model length|cannot be greater than max_(?:model_len|total_tokens)"
)
"""How vLLM says that a request overflows the context: it has no class for that error."""
_LIMIT = re.compile(r"(?:maximum context length \(|maximum model length of |max_model_len=|max_total_tokens=)(\d+)")
_MAX_MESSAGE = 1000

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status (docs.anthropic.com, "Errors"); for any other status, `api_error`."""


class ApiError(Exception):
    """An error as the client sees it.  Subclasses name what differs from their base as keywords of the class."""

    status: ClassVar[int] = 400
    type: str = "invalid_request_error"
    code: str | None = None
    retry_after_s: float | None = None
    is_final: ClassVar[bool] = False
    """Whether clients must not retry the request, although its status suggests a retry."""
    text: ClassVar[str] = ""
    """The message of an error that takes none."""

    def __init_subclass__(cls, **differing: Any) -> None:
        super().__init_subclass__()
        for name, value in differing.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        # Called by name, because `Unavailable` has a second base class whose constructor requires more arguments.
        Exception.__init__(self, message)
        self.message = clean(message)
        self.param = param
        self.code = code or self.code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object of the response or the stream's error event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.is_final:
            return {"x-should-retry": "false"}
        return {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}

    def anthropic_body(self) -> dict[str, object]:
        """The error object in the format of Anthropic's API, with `max_tokens` where vLLM names the chat completion's field.

        Clients shorten a conversation when the message says "prompt is too long".
        """
        message = self.message.replace("max_completion_tokens", "max_tokens")
        if self.code == ContextTooLong.code:
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": _ANTHROPIC.get(self.status, "api_error"), "message": message}}

    def body_for(self, path: str) -> dict[str, Any]:
        """The error object in the format of the API at this URL path."""
        return self.anthropic_body() if path.startswith("/v1/messages") else self.body()


class BadRequest(ApiError): ...


class ContextTooLong(BadRequest, code="context_length_exceeded"):
    @classmethod
    def of(cls, context: int | str, however: str, *, param: str | None = None) -> ContextTooLong:
        """An error in vLLM's words: clients recognise an overflow by them, and then shorten the conversation."""
        return cls(f"This model's maximum context length is {context} tokens. However, {however}.", param=param)


class Unauthorized(ApiError, status=401, type="authentication_error", code="invalid_api_key"):
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(ApiError, status=403, type="permission_error", code="forbidden"): ...


class NotFound(ApiError, status=404, code="not_found"): ...


class ModelNotFound(NotFound, code="model_not_found"): ...


class MethodNotAllowed(ApiError, status=405, code="method_not_allowed"): ...


class RequestTimeout(ApiError, status=408, code="request_timeout"):
    def headers(self) -> dict[str, str]:
        # The rest of this request's bytes would be read as the next request.
        return {"connection": "close"}


class UriTooLong(ApiError, status=414, code="uri_too_long"): ...


class HeadersTooLarge(ApiError, status=431, code="headers_too_large"): ...


class Conflict(ApiError, status=409, code="conflict", is_final=True): ...


class PayloadTooLarge(ApiError, status=413, code="payload_too_large"): ...


class StorageFull(PayloadTooLarge, code="storage_full"): ...


class UnsupportedMedia(ApiError, status=415, code="unsupported_media_type"): ...


class TooManyRequests(ApiError, status=429, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=1): ...


class RateLimited(TooManyRequests):
    """A limit of a key is exceeded; as `type` OpenAI names a limit per minute.  `retry_after_s` None: a retry never helps."""

    def __init__(self, message: str, type: str = "rate_limit_error", retry_after_s: float | None = 1.0) -> None:
        super().__init__(message)
        self.type, self.retry_after_s = type, retry_after_s

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        # OpenAI's clients prefer `retry-after-ms`.
        milliseconds = max(1, math.ceil(self.retry_after_s * 1000))
        return {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}


class ServerError(ApiError, status=500, type="server_error"): ...


class NotSupported(ServerError, status=501, code="not_supported", is_final=True): ...


class InternalError(ServerError, code="internal_error"):
    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request.")


class EngineFailed(ServerError, code="engine_error"): ...


class Unavailable(
    ServerError,
    vllm.GracefulHTTPError,
    status=503,
    code="unavailable",
    retry_after_s=1,
    text="The service is busy or starting. Try again.",
):
    def __init__(self, message: str | None = None) -> None:
        ApiError.__init__(self, message or self.text)
        self.http_status = HTTPStatus(self.status)


class NoVerifier(Unavailable, code="no_verifier_ready", text="No verifier is ready to serve this model. Try again."): ...


class NotAllReady(Unavailable, code="gateway_starting", text="A gateway process is being started. Try again."): ...


class Overloaded(Unavailable, code="overloaded"):
    def __init__(self, retry_after_s: int = 1) -> None:
        super().__init__(f"The server is overloaded. Try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class TooManyConnections(
    Unavailable, code="too_many_connections", text="This gateway has as many connections as it can hold. Try again."
): ...


class VerifierLost(
    Unavailable,
    code="verifier_lost",
    text="The verifier serving this request was lost, and no other was ready in time. Try again.",
): ...


class Poisoned(
    Unavailable,
    status=500,
    code="request_poisoned",
    is_final=True,
    text="Verifiers were lost one after the other while serving this request. It will not be tried again.",
): ...


class Aborted(Unavailable, code="aborted", text="An administrator has ended this request. Try again."): ...


class NoCoordinator(
    Unavailable,
    code="coordinator_unavailable",
    text="The coordinator does not answer; serving goes on, administration does not. Try again.",
): ...


class ShuttingDown(Unavailable, code="shutting_down", text="This server is shutting down. Try again elsewhere."): ...


def clean(message: str) -> str:
    """A message without paths, addresses, tracebacks or echoed values."""
    message = _VALUE_SUFFIX.sub("", message)
    message = _ADDRESS.sub("<address>", str(vllm.sanitize_message(message)))
    # vLLM's `sanitize_message` knows only some directories.
    return _PATH.sub("<path>", message)[:_MAX_MESSAGE]


def translate(error: BaseException) -> ApiError:
    """The `ApiError` for `error`; an unknown exception becomes an `InternalError`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, starlette.exceptions.HTTPException):
        return _from_http(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return BadRequest(f"`{first['loc'][-1]}`: {first['msg']}.", param=str(first["loc"][-1]))
    if isinstance(error, pydantic.ValidationError):
        return from_pydantic(error)
    if isinstance(error, CoordinatorUnavailable):
        return NoCoordinator()
    if isinstance(error, vllm.GracefulHTTPError | vllm.RetryableRequestError):
        return Unavailable()
    if isinstance(error, vllm.VLLMNotFoundError):
        return ModelNotFound(str(error), param="model")
    if isinstance(error, vllm.VLLMClientError):
        return bad_request(str(error.args[0] if error.args else error), getattr(error, "parameter", None))
    # vLLM's front half also raises these exceptions, and jinja's, for a wrong request.
    is_jinjas = any(kind.__name__ == "TemplateError" for kind in type(error).__mro__)
    if is_jinjas or isinstance(error, ValueError | NotImplementedError | OverflowError):
        return bad_request(str(error), None)
    return InternalError()


def checked(answer: Any) -> Any:
    """`answer`, as vLLM's serving classes return it.  Raises `ApiError` if it is an error response."""
    if not isinstance(answer, vllm.ErrorResponse):
        return answer
    error = answer.error
    if error.code == 404:
        raise ModelNotFound(error.message, param="model")
    if 400 <= error.code < 500 or error.code == 501:
        raise bad_request(error.message, error.param)
    raise InternalError


def bad_request(message: str, param: str | None) -> BadRequest:
    """A 400 in this server's words; a `ContextTooLong` where vLLM's wording says so."""
    # These two are names inside vLLM, not fields of the request.
    if param in ("input_text", "input_tokens"):
        param = None
    if _CONTEXT.search(message):
        limit = None if "maximum context length is" in message else _LIMIT.search(message)
        return (
            ContextTooLong(message, param=param)
            if limit is None
            else ContextTooLong.of(limit[1], message[:1].lower() + message[1:].rstrip("."), param=param)
        )
    return BadRequest(in_our_words(message), param=param or field_of(message))


def _from_http(error: starlette.exceptions.HTTPException) -> ApiError:
    if error.status_code == 404:
        return NotFound("Unknown URL.")
    if error.status_code == 405:
        return MethodNotAllowed("This method is not allowed here.")
    if 400 <= error.status_code < 500:
        return BadRequest(str(error.detail))
    return InternalError()


def from_pydantic(error: pydantic.ValidationError, within: str | None = None) -> ApiError:
    """The `ApiError` for a validation error.  `within` is the field whose value was validated; None: the whole body was."""
    first = most_telling(error.errors(include_url=False, include_input=False))
    inner = (first.get("ctx") or {}).get("error")
    if isinstance(inner, vllm.VLLMClientError):
        return translate(inner)
    path = path_of(first)
    where = ".".join(path if within is None else [within, *path])
    param, code = path[0] if path else None, None
    if within is not None:
        param = within if param is None or is_about_all(first) else f"{within}.{param}"
        code = "unknown_parameter" if first["type"] == "extra_forbidden" else None
    return BadRequest(f"{where}: {first['msg']}" if where else first["msg"], param=param, code=code)
