"""`AsyncFleet`: the requests and their retries.  The caller's event loop."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from outrider.process import FleetProcess
from outrider.types import OutriderError, Sample

RETRIED = frozenset({429, 502, 503, 504})
LONGEST_WAIT_S = 30.0


class AsyncFleet:
    """A fleet to generate with.  `async with` ends what was started."""

    def __init__(
        self,
        model: str | None = None,
        drafter: str | None = None,
        *,
        start_timeout_s: float = 600.0,
        concurrency: int = 256,
        retries: int = 8,
        **settings: object,
    ) -> None:
        """Starts when entered.  `settings` are those of `outrider serve`, such as `verifiers=2`, `drafters=1`, `mode="off"`."""
        self._settings: dict[str, object] | None = {"model": model, "drafter": drafter, **settings}
        self._start_timeout_s = start_timeout_s
        self._url = ""
        self._headers: dict[str, str] = {}
        self._prepare(concurrency, retries, None)

    @classmethod
    def join(
        cls,
        url: str,
        *,
        api_key: str | None = None,
        concurrency: int = 256,
        retries: int = 8,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> Self:
        """A fleet that runs already; it goes on after the block.  `url` is without `/v1`."""
        fleet = cls.__new__(cls)
        fleet._settings = None
        fleet._url = url.rstrip("/").removesuffix("/v1")
        fleet._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        fleet._prepare(concurrency, retries, transport)
        return fleet

    def _prepare(self, concurrency: int, retries: int, transport: httpx.AsyncBaseTransport | None) -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self._process: FleetProcess | None = None
        self._concurrency = concurrency
        self._retries = retries
        self._transport = transport
        self._model = ""
        self._weights = ""
        self._tasks: dict[int, asyncio.Task[list[Sample]]] = {}
        self._ids = itertools.count()

    async def __aenter__(self) -> Self:
        if self._settings is not None:
            self._process = await asyncio.to_thread(FleetProcess, self._settings, self._start_timeout_s)
            self._url = self._process.url
        self._slots = asyncio.Semaphore(self._concurrency)
        limits = httpx.Limits(max_connections=self._concurrency + 8)
        timeout = httpx.Timeout(None, connect=10.0)
        self._http = httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=timeout, limits=limits, transport=self._transport
        )
        try:
            self._model = (await self._send("GET", "/v1/models"))["data"][0]["id"]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await self._http.aclose()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
            self._drop_weights()

    async def generate(
        self, prompts: Sequence[str] | Sequence[list[int]], sampling_params: object = None, n: int = 1
    ) -> AsyncIterator[Sample]:
        """`n` samples of each prompt, as they finish; leaving the loop cancels the rest.

        `sampling_params` is a mapping, or an object with vLLM's field names.  A `seed` is that of sample 0; the others count
        up.  Raises `OutriderError`.
        """
        fields = _fields(sampling_params)
        tasks = [
            asyncio.create_task(self._sample(prompt, index, sample, fields))  # type: ignore[arg-type]  # of one kind
            for index, prompt in enumerate(prompts)
            for sample in range(n)
        ]
        try:
            for next_one in asyncio.as_completed(tasks):
                yield await next_one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, prompt: str | list[int], sampling_params: object = None, n: int = 1) -> int:
        """Starts `n` samples of one prompt; the id is for `poll` and `cancel`."""
        number = next(self._ids)
        fields = _fields(sampling_params)
        self._tasks[number] = asyncio.create_task(self._all(prompt, fields, n))
        return number

    async def poll(self, number: int) -> list[Sample] | None:
        """The samples once all are there, in order; None until then.  An id is answered with samples once.

        Raises `OutriderError`, and `KeyError` for an id that is not known.
        """
        if not self._tasks[number].done():
            return None
        return self._tasks.pop(number).result()

    async def cancel(self, number: int) -> None:
        """Ends what `submit` started; an id that is not known any more is no error."""
        if task := self._tasks.pop(number, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def update_weights(self, weights: Mapping[str, Any] | str | Path) -> None:
        """New weights of the target: a directory that every verifier can read, or a state dict (which needs one host).

        Running requests wait meanwhile, and compute their context anew.  Raises `OutriderError`.  Tensors of other names or
        shapes are refused, and nothing has changed then.
        """
        if not isinstance(weights, Mapping):
            await self._send("POST", "/admin/reload-weights", {"path": str(weights)})
            return
        from safetensors.torch import save_file

        # The verifiers go back to the directory of the last update, should the next one fail: it stays until then.
        directory = tempfile.mkdtemp(prefix="outrider-weights-")
        try:
            tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in _untied(weights).items()}
            await asyncio.to_thread(save_file, tensors, str(Path(directory) / "model.safetensors"))
            await self._send("POST", "/admin/reload-weights", {"path": directory})
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._drop_weights()
        self._weights = directory

    def _drop_weights(self) -> None:
        if self._weights:
            shutil.rmtree(self._weights, ignore_errors=True)
        self._weights = ""

    async def pause(self) -> None:
        """Requests wait from here on; running ones keep their state."""
        await self._send("POST", "/admin/sleep", {"level": 0})

    async def resume(self) -> None:
        """Requests go on."""
        await self._send("POST", "/admin/wake-up", {})

    async def stats(self) -> Any:
        """`GET /fleet`: members, what they do, and how much is accepted."""
        return await self._send("GET", "/fleet")

    async def _all(self, prompt: str | list[int], fields: dict[str, Any], n: int) -> list[Sample]:
        samples = [sample async for sample in self.generate([prompt], fields, n)]  # type: ignore[arg-type]
        return sorted(samples, key=lambda sample: sample.sample)

    async def _sample(self, prompt: str | list[int], index: int, sample: int, fields: dict[str, Any]) -> Sample:
        body = {**fields, "model": self._model, "prompt": prompt, "return_token_ids": True, "outrider": {"stats": True}}
        if "seed" in fields:
            body["seed"] = fields["seed"] + sample
        async with self._slots:
            answer = await self._send("POST", "/v1/completions", body)
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs")
        return Sample(
            index=index,
            sample=sample,
            prompt_token_ids=choice["prompt_token_ids"],
            token_ids=choice["token_ids"],
            text=choice["text"],
            logprobs=logprobs["token_logprobs"] if logprobs else None,
            finish_reason=choice["finish_reason"],
            account=answer["outrider"]["choices"][0] if "outrider" in answer else None,
        )

    async def _send(self, method: str, path: str, body: object = None) -> Any:
        """The answer's JSON.  Every request may be repeated: samples are independent, and the others set a state."""
        attempt = 0
        while True:
            wait_s = min(0.25 * 2**attempt, LONGEST_WAIT_S)
            try:
                answer = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                if attempt >= self._retries:
                    raise OutriderError(0, "no_answer", f"{method} {path}: {error or type(error).__name__}") from error
            else:
                if answer.is_success:
                    return answer.json()
                if answer.status_code not in RETRIED or attempt >= self._retries:
                    raise _error(answer)
                wait_s = _retry_after_s(answer, wait_s)
            await asyncio.sleep(wait_s)
            attempt += 1


def _fields(sampling_params: object) -> dict[str, Any]:
    """Only what was set: the fleet has the same defaults as vLLM."""
    if sampling_params is None:
        return {}
    if isinstance(sampling_params, Mapping):
        fields = dict(sampling_params)
    else:  # vLLM's SamplingParams (a msgspec struct) or any other object.
        names = getattr(sampling_params, "__struct_fields__", None) or vars(sampling_params)
        fields = {name: getattr(sampling_params, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in fields.items() if value is not None}


def _untied(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor under the first of its names, as checkpoints have tied embeddings."""
    by_place = {(tensor.device, tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(list(weights.items()))}
    return {name: weights[name] for name in by_place.values()}


def _error(answer: httpx.Response) -> OutriderError:
    try:
        error = answer.json()["error"]
        return OutriderError(answer.status_code, error.get("code"), error["message"])
    except (ValueError, KeyError, TypeError):
        return OutriderError(answer.status_code, None, answer.text[:500])


def _retry_after_s(answer: httpx.Response, otherwise: float) -> float:
    try:
        return min(float(answer.headers["retry-after"]), LONGEST_WAIT_S)
    except (KeyError, ValueError):
        return otherwise
