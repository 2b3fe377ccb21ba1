"""`outrider rollout` and `outrider trace`: options in, results out; the fleet is the rollout's own, or a running one.

The command's process, main thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache as cached
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from backend.config import REMOTE_MODES, Settings, environment, sources
from backend.config.sources import CommandError, ConfigError, Loaded
from backend.models.resolve import ModelError, ResolvedModels, resolve
from backend.rollout.options import RolloutOptions, fleet_settings, joined_settings, rollout_options, slices, trace_options

if TYPE_CHECKING:
    from backend.coordinator.actor import CoordinatorHandle
    from backend.rollout.log import RoundLog
    from backend.rollout.requests import Request, Tokenizer
    from backend.rollout.run import Sampling
    from backend.rollout.trace import Case
    from backend.rollout.workers import Workers

Say = Callable[[str], None]

DEFAULT_TOKENS = 1024
"""Longest free response, unless told otherwise."""


class _Work(NamedTuple):
    """What a rollout is to do, checked."""

    step: int
    rounds: list[list[Request]]
    tokenizer: Tokenizer
    sampling: Sampling
    logs: list[RoundLog]


class _Place(NamedTuple):
    """The fleet that does it."""

    coordinator: CoordinatorHandle
    settings: Settings
    models: ResolvedModels
    node_id: str


def rollout(arguments: Sequence[str], say: Say) -> None:
    """Runs one rollout.  Raises `ConfigError` for what is wrong with the input, `CommandError` for what goes wrong later."""
    options, rest = rollout_options(arguments)
    loaded = sources.load(rest, "outrider rollout")
    seed = loaded.settings.seed if ("seed",) in loaded.origins else None
    with _errors_of_one_line(options):
        if options.join is not None:
            with _joined_fleet(options, loaded) as place:
                _rounds(options, place, _prepare(options, place.settings, lambda: place.models, seed, say), say)
            return
        settings, models = fleet_settings(options, loaded), cached(lambda: _models(settings, options, say))
        work = _prepare(options, settings, models, seed, say)
        with _own_fleet(settings, models(), say) as place:
            _rounds(options, place, work, say)


def _prepare(
    options: RolloutOptions, settings: Settings, models: Callable[[], ResolvedModels], seed: int | None, say: Say
) -> _Work:
    """Every check that can be made before anything runs; `models` are asked for when the cheap ones have passed."""
    # Imported here, as are other heavy modules below: help and wrong flags come at once.
    from backend.rollout.log import RoundLog
    from backend.rollout.requests import Tokenizer
    from backend.rollout.trace import TraceError, trace_file
    from backend.rollout.weights import WeightsError, check_weights

    try:
        file, step = trace_file(options.trace, options.step)
        cases = _cases(options, file)
        rows = slices(options, len(cases))
        _check_out(options.out)
        found = models()
        _prepare_process()
        tokenizer = Tokenizer(found.target_dir)
        parts = [_requests(options, settings, found, cases[each.start : each.stop], file, tokenizer) for each in rows]
        sampling = _sampling(options, found, tokenizer, seed)
        logs = [RoundLog(wanted) for wanted in options.log]
        if options.weights_dir is not None:
            check_weights(options.weights_dir, found.target_dir)
    except (TraceError, ModelError) as error:
        raise ConfigError(str(error)) from error
    except WeightsError as error:
        raise ConfigError(f"--weights-dir {error}") from error
    lengths = [request.expected for part in parts for request in part]
    say(f"{file}: {len(lengths)} requests, {sum(lengths)} response tokens expected, {max(lengths)} at most")
    return _Work(step, [part for part in parts for _ in range(options.repeat)], tokenizer, sampling, logs)


def trace(arguments: Sequence[str], say: Say) -> None:
    """`outrider trace make`.  Raises `ConfigError`."""
    if not arguments or arguments[0] != "make":
        raise ConfigError("there is one command: outrider trace make (see outrider trace make --help)")
    options = trace_options(arguments[1:])
    from backend.rollout.make import make_trace
    from backend.rollout.trace import TraceError

    try:
        say(make_trace(options))
    except (TraceError, ModelError) as error:
        raise ConfigError(str(error)) from error


def _cases(options: RolloutOptions, file: Path) -> list[Case]:
    from backend.rollout.trace import match, read_prompts, read_trace

    cases = read_trace(file)
    if options.prompts is not None:
        cases = match(read_prompts(options.prompts), cases, options.prompts, file)
    return cases[: options.limit]


def _check_out(out: Path) -> None:
    """Finds out now, and not after hours, that nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".outrider-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _models(settings: Settings, options: RolloutOptions, say: Say) -> ResolvedModels:
    models = resolve(settings, say)
    if options.method in ("eagle", "eagle3"):
        from backend.models.head_config import load_config

        assert models.drafter_dir is not None, "`fleet_settings` lets no EAGLE method through without a head"
        is_head = models.drafter_kind == "eagle"
        kind = load_config(models.drafter_dir, models.target_dir).kind if is_head else models.drafter_kind
        if kind != options.method:
            raise ConfigError(f"--method {options.method}: --drafter {settings.drafter} is of kind {kind}")
    return models


def _prepare_process() -> None:
    """This process talks vLLM's protocol and has no engine: what vLLM would log about one is noise."""
    from backend.launch.fleet import member_environment

    environment.export({"VLLM_LOGGING_LEVEL": "ERROR"}, override=False)
    environment.export(member_environment(offline=True))


def _requests(
    options: RolloutOptions,
    settings: Settings,
    models: ResolvedModels,
    cases: Sequence[Case],
    file: Path,
    tokenizer: Tokenizer,
) -> list[Request]:
    from backend.rollout.requests import context_length, make_requests

    room = context_length(models.target_dir, settings.verifier.max_model_len)
    named, most = options.prompts or file, options.max_tokens
    return make_requests(cases, tokenizer, named, options.fixed, options.samples, most, DEFAULT_TOKENS, room)


def _sampling(options: RolloutOptions, models: ResolvedModels, tokenizer: Tokenizer, seed: int | None) -> Sampling:
    from backend.engine.client import free_sampling
    from backend.models.head_config import read_config, text_config
    from backend.rollout.run import Sampling

    if options.fixed:
        return Sampling(options.temperature, None, seed)
    vocab_size = int(text_config(read_config(models.target_dir))["vocab_size"])
    given = {**options.sampling, "temperature": options.temperature}
    try:
        free = free_sampling(given, tokenizer.eos_token_ids, tokenizer.hugging_face, vocab_size)
    except ValueError as error:
        raise ConfigError(f"--sampling: {error}") from error
    return Sampling(options.temperature, free, seed)


@contextmanager
def _errors_of_one_line(options: RolloutOptions) -> Iterator[None]:
    from backend.config.runtime import StateError
    from backend.coordinator import CoordinatorUnavailable
    from backend.launch.cluster import ClusterError
    from backend.launch.plan import PlanError
    from backend.launch.processes import LaunchError
    from backend.rollout.run import RolloutError

    try:
        yield
    except (ClusterError, CoordinatorUnavailable, LaunchError, PlanError, RolloutError, StateError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename or options.out}: {error.strerror or error}") from error


@contextmanager
def _own_fleet(settings: Settings, models: ResolvedModels, say: Say) -> Iterator[_Place]:
    from backend.launch.fleet import Fleet

    fleet = Fleet.launch(settings, models, say)
    try:
        fleet.wait_ready(say)
        yield _Place(fleet.coordinator, fleet.settings, models, fleet.cluster.node_id)
    finally:
        say("stopping")
        fleet.stop()


@contextmanager
def _joined_fleet(options: RolloutOptions, loaded: Loaded) -> Iterator[_Place]:
    from backend.launch.finding import found_fleet

    with found_fleet(loaded, options.join or None) as (coordinator, cluster):
        info = coordinator.info()
        settings = joined_settings(options, loaded, Settings.model_validate_json(info.settings_json))
        yield _Place(coordinator, settings, info.models, cluster.node_id)


def _rounds(options: RolloutOptions, place: _Place, work: _Work, say: Say) -> None:
    from backend.rollout.bar import Bar
    from backend.rollout.report import markdown, round_report
    from backend.rollout.run import RoundRunner
    from backend.rollout.trace import Case, write_cases
    from backend.rollout.workers import Workers
    from backend.rollout.write import cases_file, round_directory, write_round

    about = _about(options, place, work.step)
    slots, interval_s = place.settings.verifier.max_num_seqs, place.settings.gateway.balance_interval_s
    workers = Workers(place.coordinator, place.coordinator.info().fleet_keys, place.node_id, place.models.target_dir)
    cases: dict[int, Case] = {}
    try:
        workers.look()
        for number, requests in enumerate(work.rounds):
            fault = _renew(options.weights_dir, workers, say) if number and options.weights_dir is not None else ""
            bar = Bar(sys.stderr, f"round {number}", len(requests))
            runner = RoundRunner(number, requests, workers, slots, work.sampling, bar, interval_s)
            runner.say = say
            finished = runner.run()
            report = round_report(finished, about, workers.version, fault)
            directory = round_directory(options.out, work.step, number)
            write_round(directory, finished, report)
            for each in requests:
                text = each.case.gen if each.fixed is not None else work.tokenizer.text(finished.responses[each.number])
                cases[each.number] = Case(each.number, each.case.prompt, text)
            write_cases(cases_file(options.out, work.step), [cases[each] for each in sorted(cases)])
            for log in work.logs:
                _log(log, work.step + number, report, say)
            say(f"{directory}:\n{markdown(report)}")
    finally:
        workers.close()
        for log in work.logs:
            log.close()


def _renew(directory: Path, workers: Workers, say: Say) -> str:
    """The newest weights, unless they are loaded already; returns why they could not be."""
    from backend.rollout.weights import WeightsError, newest

    try:
        found = newest(directory)
        if found is None or str(found) == workers.weights.path:
            return ""
        fault = workers.load(found)
    except WeightsError as error:
        fault = str(error)
    say(f"weights {workers.weights.version} stay: {fault}" if fault else f"weights {workers.weights.version} are loaded")
    return fault


def _log(log: RoundLog, step: int, report: dict[str, Any], say: Say) -> None:
    try:
        log.write(step, report)
    except Exception as error:
        # Whatever a curve fails by, the rollout is worth more.
        say(f"the round is not in the log: {error}")


def _about(options: RolloutOptions, place: _Place, step: int) -> dict[str, Any]:
    """What every round of this rollout has in common."""
    _, settings, models, _ = place
    remote = settings.mode in REMOTE_MODES
    method = options.method or models.drafter_kind
    if method == "eagle" and models.drafter_dir is not None:
        from backend.models.head_config import load_config

        method = load_config(models.drafter_dir, models.target_dir).kind
    return {
        "step": step,
        "implementation": "native" if settings.mode == "native" else "disaggregated",
        "mode": settings.mode,
        "method": method,
        "k": settings.num_speculative_tokens if settings.mode != "off" else 0,
        "model": models.name,
        "verifiers": settings.verifiers,
        "drafters": settings.drafters if remote else 0,
        "fixed_responses": options.fixed,
        "temperature": options.temperature,
    }
