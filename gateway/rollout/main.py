"""`outrider rollout` and `outrider trace`: checks the options, starts or joins a fleet, runs the rounds, writes the results.

The command's process, main thread.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache as cached
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from backend.config import REMOTE_MODES, Settings, sources
from backend.config.logs import configure_logging
from backend.config.sources import CommandError, ConfigError, Say
from backend.models.head_config import load_config
from backend.models.resolve import ResolvedModels, resolve, trusts_code
from backend.rollout.make import make_trace
from backend.rollout.options import check_joined, fleet_settings, rollout_options, slices, trace_options
from backend.rollout.report import round_report
from backend.rollout.requests import RolloutRequest, Tokenizer, make_requests
from backend.rollout.results import write_round
from backend.rollout.trace import Case, match, read_prompts, read_trace, trace_file, write_cases
from backend.transport.sockets import Wire

# vLLM and Ray are imported where they are used, so that help and errors in the input are shown at once.
if TYPE_CHECKING:
    from backend.coordinator.actor import CoordinatorHandle
    from backend.engine.front.offline import OfflineProcessor
    from backend.launch.cluster import RayCluster


class _Work(NamedTuple):
    """A rollout's work, after all checks."""

    step: int
    rounds: list[list[RolloutRequest]]
    front: OfflineProcessor


def rollout(arguments: Sequence[str], say: Say) -> None:
    """Runs one rollout.  Raises `ConfigError` for faults in the input, `CommandError` for later failures."""
    configure_logging("warning")
    options, rest = rollout_options(arguments)
    loaded = sources.load(rest, "outrider rollout")
    try:
        if options.join is not None:
            from backend.launch.finding import found_fleet

            check_joined(loaded)
            with found_fleet(loaded, options.join or None) as fleet:
                info = fleet[0].info()
                work = _prepare(options, Settings.model_validate_json(info.settings_json), lambda: info.models, say)
                asyncio.run(_rounds(options, *fleet, work, say))
            return
        settings, models = fleet_settings(options, loaded.settings), cached(lambda: resolve(settings, say))
        work = _prepare(options, settings, models, say)
        with _own_fleet(settings, models(), say) as fleet:
            asyncio.run(_rounds(options, *fleet, work, say))
    except OSError as error:
        raise CommandError(f"{error.filename or options.out}: {error.strerror or error}") from error


def _prepare(options: Namespace, settings: Settings, models: Callable[[], ResolvedModels], say: Say) -> _Work:
    """Makes every check that is possible before anything runs; calls `models` after the cheap checks, since it may download."""
    from backend.launch.fleet import prepare_process

    file, step = trace_file(options.trace, options.step)
    cases = read_trace(file)
    if options.prompts is not None:
        cases = match(read_prompts(options.prompts), cases, options.prompts, file)
    rows = slices(options, len(cases))
    _check_out(options.out)
    found = models()
    prepare_process()
    front, tokenizer = _front(options, settings, found), Tokenizer(found.target_dir, trusts_code(settings))
    named = options.prompts or file
    parts = [make_requests(cases[each.start : each.stop], tokenizer, named, options, front) for each in rows]
    lengths = [request.expected for part in parts for request in part]
    say(f"{file}: {len(lengths)} requests, {sum(lengths)} response tokens expected, {max(lengths)} at most")
    return _Work(step, [part for part in parts for _ in range(options.repeat)], front)


def trace(arguments: Sequence[str], say: Say) -> None:
    """`outrider trace make`.  Raises `ConfigError`."""
    if not arguments or arguments[0] != "make":
        raise ConfigError("there is one command: outrider trace make (see outrider trace make --help)")
    say(make_trace(trace_options(arguments[1:])))


def _check_out(out: Path) -> None:
    """Raises `ConfigError` now, rather than after hours, if nothing can be written to `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _method(models: ResolvedModels) -> str:
    """How drafts are made: the drafter's kind, or the kind of EAGLE head."""
    if models.drafter_kind == "eagle" and models.drafter_dir is not None:
        return load_config(models.drafter_dir, models.target_dir).kind
    return models.drafter_kind


def _front(options: Namespace, settings: Settings, models: ResolvedModels) -> OfflineProcessor:
    """Checks what all requests share: engine arguments and sampling parameters."""
    from backend.engine.front.offline import OfflineProcessor

    try:
        front = OfflineProcessor(settings, models.target_dir)
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    try:
        front.params([0], options.sampling)
    except ValueError as error:
        raise ConfigError(f"--sampling: {error}") from error
    return front


@contextmanager
def _own_fleet(settings: Settings, models: ResolvedModels, say: Say) -> Iterator[tuple[CoordinatorHandle, RayCluster]]:
    from backend.launch.fleet import LaunchedFleet
    from backend.launch.operator import Operator

    fleet = LaunchedFleet.launch(settings, models, say)
    try:
        fleet.wait_ready(say)
        Operator(fleet, say).start()
        yield fleet.coordinator, fleet.cluster
    finally:
        say("stopping")
        fleet.stop()


async def _rounds(options: Namespace, coordinator: CoordinatorHandle, cluster: RayCluster, work: _Work, say: Say) -> None:
    from gateway.fleet.directory import Directory
    from gateway.rollout.fleet import RolloutFleet
    from gateway.rollout.run import RoundRunner

    info = coordinator.info()
    settings = Settings.model_validate_json(info.settings_json)
    about = _about(options, settings, info.models, work.step)
    wire = Wire(info.fleet_keys, node_id=cluster.node_id)
    fleet = RolloutFleet(Directory(coordinator), wire, settings, say)
    cases: dict[int, Case] = {}
    fleet.core.start()
    try:
        await fleet.until_complete()
        if options.fixed:
            fleet.check_fixed()
        for number, requests in enumerate(work.rounds):
            responses = work.front.outputs(fleet.core)
            finished = await RoundRunner(number, requests, fleet, responses, say, options.seed).run()
            report, text = round_report(finished, about, fleet.version)
            directory = options.out / f"step{work.step}" / f"round{number}"
            write_round(directory, finished, report, text, settings)
            for each in requests:
                gen = each.case.gen if options.fixed else finished.responses[each.number].outputs[0].text
                cases[each.number] = Case(each.number, each.case.prompt, gen)
            write_cases(options.out / "cases" / f"train.{work.step}.parquet", [cases[each] for each in sorted(cases)])
            say(f"{directory}:\n{text}")
    finally:
        fleet.core.shutdown()


def _about(options: Namespace, settings: Settings, models: ResolvedModels, step: int) -> dict[str, Any]:
    """The fields of the report that all rounds of this rollout share."""
    remote = settings.mode in REMOTE_MODES
    return {
        "step": step,
        "mode": settings.mode,
        "method": _method(models),
        "k": settings.num_speculative_tokens if settings.mode != "off" else 0,
        "model": models.name,
        "verifiers": settings.verifiers,
        "drafters": settings.drafters if remote else 0,
        "fixed_responses": options.fixed,
        "temperature": options.sampling["temperature"],
    }
