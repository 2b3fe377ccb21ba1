"""Log probabilities in vLLM's answers: repairs of what its serving classes show of them."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, TypeVar

from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput

TokenT = TypeVar("TokenT", bound=int)


def likeliest(found: Mapping[TokenT, Logprob], k: int | None) -> dict[TokenT, Logprob]:
    """The tokens of a position, the `k` likeliest first; of `logprob_token_ids`, those that were asked for.

    vLLM puts the drawn token first, and its serving classes show the first `k` entries.
    """
    entries = list(found.items())
    if k and 0 < k < len(entries):
        return dict([*entries[1:], entries[0]])
    return dict(sorted(entries, key=lambda entry: entry[1].rank or 0))


class ChatLogprobs:
    """Mixin over vLLM's chats: the likeliest tokens, and the field `refusal` of OpenAI's schema."""

    def _create_chat_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._create_chat_logprobs(*args, **kwargs)  # type: ignore[misc]
        made.refusal = None
        return made

    def _get_top_logprobs(self, logprobs: Any, top_logprobs: int | None, *args: Any, return_all: bool = False) -> Any:
        shown = logprobs if return_all else likeliest(logprobs, top_logprobs)
        return super()._get_top_logprobs(shown, top_logprobs, *args, return_all=return_all)  # type: ignore[misc]


class TokensLogprobs:
    """Mixin over vLLM's token route: the likeliest tokens."""

    def _create_text_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        return super()._create_text_logprobs(*args, **_likeliest_of_each(**kwargs))  # type: ignore[misc]

    def _create_tokens_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        return super()._create_tokens_logprobs(*args, **_likeliest_of_each(**kwargs))  # type: ignore[misc]


def _likeliest_of_each(top_logprobs: Any, **others: Any) -> dict[str, Any]:
    # vLLM 0.32 says how many it shows.  0.33 shows all of them, unless there is a `top_limit`.
    k = others.get("num_output_top_logprobs", others.get("top_limit"))
    shown = [each if each is None else likeliest(each, k) for each in top_logprobs]
    return {"top_logprobs": shown, **others}


async def repeat_prompt_logprobs(
    results: AsyncIterator[tuple[int, RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Results by prompt.  Each has its prompt's log probabilities.

    vLLM puts them into the first result of each choice.  They are lost if that is joined to a later one of another choice.
    """
    kept: dict[int, Any] = {}
    async for prompt, result in results:
        kept[prompt] = result.prompt_logprobs = result.prompt_logprobs or kept.get(prompt)
        yield prompt, result
