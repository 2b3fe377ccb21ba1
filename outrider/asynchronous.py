"""`AsyncFleet`: the Python API of a fleet, as HTTP requests.  Runs in the caller's event loop."""

import asyncio
import inspect
import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, SupportsFloat, TypeVar

import httpx

from outrider.connection import Connection
from outrider.parameters import fields_of
from outrider.process import FleetProcess
from outrider.types import Episode, OutriderError, Sample, WeightSpan

T = TypeVar("T")
Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or messages for the model's chat template."""
Reply = str | list[int] | SupportsFloat | None
"""An environment's reply: text or token ids continue the episode; a number, its reward, ends it; None ends it without one."""
Step = Callable[[Episode], Reply | Awaitable[Reply]]


class AsyncFleet:
    """A fleet to generate with.  `async with` stops a fleet that it has started."""

    def __init__(
        self,
        model: str | Path | None = None,
        drafter: str | Path | None = None,
        *,
        start_timeout_s: float = 600.0,
        concurrency: int = 256,
        retries: int = 8,
        weights_dir: str | Path | None = None,
        **settings: object,
    ) -> None:
        """A new fleet, which `async with` starts.  `settings` are those of `outrider serve`, such as `verifiers=2`.

        `concurrency` bounds the requests at a time, `retries` how often one is sent again.  State dicts are written below
        `weights_dir`, which the verifiers must be able to read; by default, the machine's temporary directory.
        """
        # Requests are routed by session, and only the turns of an episode are one.
        own = {"model": model, "drafter": drafter, "gateway_affinity": "session"}
        self._settings: dict[str, object] | None = own | settings
        self._start_timeout_s = start_timeout_s
        keys = (settings.get(name) for name in ("api_key", "gateway_api_key", "gateway_admin_key"))
        self._connection = Connection("", _key(next(filter(None, keys), None)), concurrency, retries)
        self._prepare(weights_dir)

    @classmethod
    def join(
        cls,
        url: str,
        *,
        api_key: str | None = None,
        concurrency: int = 256,
        retries: int = 8,
        weights_dir: str | Path | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> Self:
        """A fleet that runs already, and goes on after the block.  `url` is its gateway's."""
        fleet = cls.__new__(cls)
        fleet._settings = None
        fleet._connection = Connection(url.rstrip("/").removesuffix("/v1"), api_key, concurrency, retries, transport)
        fleet._prepare(weights_dir)
        return fleet

    def _prepare(self, weights_dir: str | Path | None) -> None:
        # Verifiers run in other directories.
        self._weights_dir = weights_dir and os.path.abspath(weights_dir)
        self._model = ""
        self._directories: list[str] = []
        """Directories of state dicts: the last one that verifiers surely have loaded, and later ones."""
        self._tasks: dict[int, asyncio.Task[list[Sample]]] = {}
        self._ids = itertools.count()

    async def __aenter__(self) -> Self:
        try:
            if self._settings is not None:
                self._connection.process = process = FleetProcess(self._settings)
                self._connection.url = await asyncio.to_thread(process.wait_until_it_serves, self._start_timeout_s)
            self._model = (await self._connection.send("GET", "/v1/models"))["data"][0]["id"]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await _end(self._tasks.values())
        self._tasks.clear()
        await self._connection.close()
        if self._connection.process is not None:
            await asyncio.to_thread(self._connection.process.stop)
            # Only for a fleet that was stopped: a verifier that restarts in a joined fleet may load the last update again.
            self._drop_directories(slice(None))

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: object = None, n: int | None = None, *, model: str | None = None
    ) -> AsyncGenerator[Sample, None]:
        """`n` samples of each prompt, as they finish.  Closing the generator cancels the rest.

        `sampling_params` is a `SamplingParams` of vLLM, or a mapping with the names of its fields.  A `seed` is that of
        sample 0; each further sample has the next number.  `model` names a LoRA adapter.  Raises `OutriderError`.
        """
        return self._as_they_finish(prompts, sampling_params, n, partial(self._sample, model))

    def episodes(
        self,
        starts: Sequence[Prompt],
        step: Step,
        sampling_params: object = None,
        n: int | None = None,
        *,
        model: str | None = None,
    ) -> AsyncGenerator[Episode, None]:
        """`n` conversations from each start, as they finish.

        `step` gets the episode after each output (`episode.turns[-1]`) and returns a `Reply`.  It may be a coroutine function;
        other functions run in threads.  A reply's tokens are appended unchanged, so `Episode.token_ids` are exactly the tokens
        that the model saw.  The turns of an episode share a session, so that a verifier has their prefix in its prefix cache.
        An episode that grows beyond the model's context ends without a reward.  Raises `OutriderError`.
        """
        return self._as_they_finish(starts, sampling_params, n, partial(self._episode, model, step))

    async def _as_they_finish(
        self,
        prompts: Sequence[Prompt],
        sampling_params: object,
        n: int | None,
        work: Callable[[list[int], int, int, dict[str, Any]], Coroutine[Any, Any, T]],
    ) -> AsyncGenerator[T, None]:
        """Results of `work`, called with the prompt, its number, the sample's number and the sample's parameters."""
        fields = fields_of(sampling_params)
        count = fields.pop("n", 1)
        tokens = await _all(self._tokens(prompt) for prompt in prompts)
        tasks = [
            asyncio.create_task(work(prompt, index, sample, _seeded(fields, sample)))
            for index, prompt in enumerate(tokens)
            for sample in range(count if n is None else n)
        ]
        try:
            for next_one in asyncio.as_completed(tasks):
                yield await next_one
        finally:
            await _end(tasks)

    async def submit(
        self, prompt: Prompt, sampling_params: object = None, n: int | None = None, *, model: str | None = None
    ) -> int:
        """Starts `n` samples of one prompt.  Returns an id for `poll`, `wait` and `cancel`."""

        async def samples() -> list[Sample]:
            found = [sample async for sample in self.generate([prompt], sampling_params, n, model=model)]
            return sorted(found, key=lambda sample: sample.sample)

        number = next(self._ids)
        self._tasks[number] = asyncio.create_task(samples())
        return number

    async def poll(self, number: int) -> list[Sample] | None:
        """The samples in order when all have finished; None before.  After that, the id is not known any more.

        Raises `OutriderError`, or `KeyError` for an id that is not known.
        """
        if not self._submitted(number).done():
            return None
        return self._tasks.pop(number).result()

    async def wait(self, number: int) -> list[Sample]:
        """As `poll`, but waits for the samples."""
        await asyncio.wait([self._submitted(number)])
        self._submitted(number)  # Another caller may have taken or cancelled them meanwhile.
        return self._tasks.pop(number).result()

    def _submitted(self, number: int) -> asyncio.Task[list[Sample]]:
        if number not in self._tasks:
            raise KeyError(f"no samples have the id {number}: it is not of `submit`, or they were taken or cancelled")
        return self._tasks[number]

    async def cancel(self, number: int) -> None:
        """Ends samples that `submit` has started; ignores an id that is not known."""
        if task := self._tasks.pop(number, None):
            await _end([task])

    async def update_weights(self, weights: Mapping[str, Any] | str | Path, version: str | int | None = None) -> str:
        """Loads new weights of the target, from a directory that every verifier can read or a state dict of torch tensors.

        Running requests stand still meanwhile, and go on with the new weights.  Returns the version's name: `version`, or the
        update's number.  Tensors with other names or shapes are refused, and nothing changes.  Raises `OutriderError`.
        """
        if not isinstance(weights, Mapping):
            return await self._load(os.path.abspath(weights), version)
        directory = tempfile.mkdtemp(prefix="outrider-weights-", dir=self._weights_dir)
        try:
            if self._weights_dir is not None:
                Path(directory).chmod(0o755)  # Verifiers on other machines may run as another user.
            file = Path(directory) / "model.safetensors"
            await asyncio.to_thread(_write, weights, file)
            if self._weights_dir is not None:
                file.chmod(0o644)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._directories.append(directory)
        try:
            version = await self._load(directory, version)
        except OutriderError as error:
            if 400 <= error.status < 500:
                self._drop_directories(slice(-1, None))
            raise
        # Before this point, a verifier could still have loaded an earlier directory.
        self._drop_directories(slice(-1))
        return version

    async def _load(self, directory: str, version: str | int | None) -> str:
        body = {"weight_dir": directory} if version is None else {"weight_dir": directory, "weight_version": version}
        return str((await self._connection.send("POST", "/update_weights", body))["weight_version"])

    def _drop_directories(self, which: slice) -> None:
        for directory in self._directories[which]:
            shutil.rmtree(directory, ignore_errors=True)
        del self._directories[which]

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        """Loads a LoRA adapter from a directory that every verifier can read, or replaces the one of this name."""
        await self._connection.send("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": os.path.abspath(directory)})

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Frees the devices' memory (levels 1 and 2, on CUDA) or only pauses (0); requests are kept, or end (`abort`)."""
        await self._connection.send("POST", f"/sleep?level={level}&mode={mode}")

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Ends a sleep, or a part of it: `weights`, `kv_cache`."""
        await self._connection.send("POST", "/wake_up" + ("?tags=" + "&tags=".join(tags) if tags else ""))

    async def pause(self, mode: str = "keep") -> None:
        """Pauses verifiers: new requests wait; running ones stand still (`keep`), end (`abort`) or finish first (`wait`)."""
        await self._connection.send("POST", f"/pause?mode={mode}")

    async def resume(self) -> None:
        """Ends a pause."""
        await self._connection.send("POST", "/resume")

    @property
    def url(self) -> str:
        """The gateway's address, without `/v1`; of a fleet of one's own, while it runs."""
        return self._connection.url

    async def stats(self) -> Any:
        """The answer of `GET /fleet`: members, their load, and acceptance lengths."""
        return await self._connection.send("GET", "/fleet")

    async def _tokens(self, prompt: Prompt, *, begins: bool = True) -> list[int]:
        if isinstance(prompt, str):
            body: dict[str, Any] = {"prompt": prompt, "add_special_tokens": begins}
        elif prompt and isinstance(prompt[0], Mapping):
            body = {"messages": prompt}
        else:
            return list(prompt)  # type: ignore[arg-type]  # what is left are token ids
        answer = await self._connection.send_in_turn("/tokenize", {"model": self._model, **body})
        tokens: list[int] = answer["tokens"]
        return tokens

    async def _sample(
        self, model: str | None, prompt: list[int], index: int, sample: int, fields: dict[str, Any], session: str | None = None
    ) -> Sample:
        fields = dict(fields)
        logprobs_mode = fields.pop("logprobs_mode", None)
        body = {
            "model": model or self._model,
            "token_ids": prompt,
            "sampling_params": fields,
            "output_mode": "text" if fields.get("detokenize", True) else "tokens",
            "outrider": {"stats": True, "logprobs_mode": logprobs_mode},
        }
        answer = await self._connection.send_in_turn("/inference/v1/generate", body, session)
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs")
        return Sample(
            index=index,
            sample=sample,
            prompt_token_ids=prompt,
            token_ids=choice["token_ids"],
            text=choice.get("text"),
            logprobs=[each["logprob"] for each in logprobs["content"]] if logprobs else None,
            finish_reason=choice["finish_reason"],
            weight_versions=[WeightSpan(**each) for each in choice.get("weight_versions") or ()],
            cached_tokens=(answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            account=answer["outrider"]["choices"][0] if "outrider" in answer else None,
        )

    async def _episode(
        self, model: str | None, step: Step, start: list[int], index: int, sample: int, fields: dict[str, Any]
    ) -> Episode:
        episode = Episode(index, sample, list(start), [False] * len(start))
        session = uuid.uuid4().hex
        while True:
            try:
                turn = await self._sample(model, list(episode.token_ids), index, sample, fields, session)
            except OutriderError as error:
                if error.code == "context_length_exceeded" and episode.turns:
                    return episode
                raise
            episode.turns.append(turn)
            episode.token_ids += turn.token_ids
            episode.output_mask += [True] * len(turn.token_ids)
            reply = step(episode) if inspect.iscoroutinefunction(step) else await asyncio.to_thread(step, episode)
            if inspect.isawaitable(reply):
                reply = await reply
            if reply is None or isinstance(reply, SupportsFloat):
                episode.reward = None if reply is None else float(reply)
                return episode
            added = await self._tokens(reply, begins=False)
            episode.token_ids += added
            episode.output_mask += [False] * len(added)


def _key(given: object) -> str | None:
    """The key itself, where `@FILE` is given."""
    key = None if given is None else str(given)
    return Path(key[1:]).expanduser().read_text().strip() if key and key.startswith("@") else key


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order.  If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _seeded(fields: dict[str, Any], sample: int) -> dict[str, Any]:
    """The parameters of one sample: each has a seed of its own."""
    return {**fields, "seed": fields["seed"] + sample} if "seed" in fields else fields


def _write(weights: Mapping[str, Any], file: Path) -> None:
    """Writes the tensors in safetensors' format.  Tied tensors are written once, under the first name, as in checkpoints."""
    from safetensors.torch import save_file

    if spread := next((name for name, tensor in weights.items() if hasattr(tensor, "full_tensor")), None):
        raise TypeError(
            f"{spread} is a DTensor, spread over devices: gather the state dict first, for example by full_tensor()"
        )
    by_place = {
        (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()): name
        for name, tensor in reversed(list(weights.items()))
    }
    save_file({name: weights[name].detach().cpu().clone().contiguous() for name in by_place.values()}, str(file))
