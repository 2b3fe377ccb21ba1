"""The command line: `outrider serve | gateway | status | ...`, see `COMMANDS`.

`serve` is the launcher and the gateway in one process: it starts the fleet (Ray actors), imports vLLM while the engines load,
serves HTTP from this process's main thread, and ends everything it started.  The heavy imports are inside the commands, so that
help, version and configuration errors come at once.  Wrong user input gives one line on stderr and exit status 2; a failure at
run time gives one line and exit status 1.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Thread

import msgspec

from backend.config import sources
from backend.config.logs import configure_logging
from backend.config.sources import CommandError, ConfigError
from gateway.cli import administer, console
from gateway.cli.preflight import check_gateway, check_keys
from gateway.cli.processes import (
    GATEWAY_PROCESS,
    further_processes,
    gateway_process,
    joined_fleet,
    run_gateway,
)
from gateway.cli.signals import FAILED, INTERRUPTED, MISUSED, OK, signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return OK if given else MISUSED
    if given[0] in ("-V", "--version", "version"):
        print("outrider", importlib.metadata.version("outrider"))
        return OK
    commands = {name: command for name, (_, command) in (COMMANDS | CHANGES).items()}
    if given[0] not in commands and given[0] != GATEWAY_PROCESS:
        return fail(f"no command {given[0]!r}; there are {', '.join(commands)}", MISUSED)
    try:
        return commands.get(given[0], gateway_process)(given[1:])
    except ConfigError as error:
        return fail(str(error), MISUSED)
    except CommandError as error:
        return fail(str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED


def usage() -> str:
    """The help of `outrider` itself."""

    def listed(commands: Mapping[str, tuple[str, object]]) -> str:
        return "\n".join(f"  {name:<13} {summary}" for name, (summary, _) in commands.items())

    return f"""usage: outrider COMMAND [--name value ...]

commands:
{listed(COMMANDS)}

changing a running fleet:
{listed(CHANGES)}

`outrider COMMAND --help` lists the settings; each is also a variable (OUTRIDER_GATEWAY__PORT) and a key
of the YAML file given with --config.  `outrider --version` prints the version.
"""


def fail(line: str, code: int) -> int:
    """Prints the error on stderr and returns the exit status `code`."""
    print(f"outrider: {line}", file=sys.stderr)
    return code


def serve(arguments: list[str]) -> int:
    """Starts a fleet and serves it."""
    loaded = sources.load(arguments, "outrider serve", "Starts verifiers, drafters and a gateway.")
    settings = loaded.settings
    progress = console.Progress()
    configure_logging(settings.log_level, settings.log_format)
    with signals() as forced:
        from backend import tracing
        from backend.models.resolve import resolve

        models = resolve(settings, progress.say)
        progress.say(console.plan_line(settings, models))
        check_gateway(settings)
        tracing.check(settings.tracing)
        from backend.launch.fleet import LaunchedFleet, prepare_process

        fleet: LaunchedFleet | None = None
        try:
            fleet = LaunchedFleet.launch(settings, models, progress.say)
            prepare_process()
            # An error is raised again where the module is used.
            preparing = Thread(target=importlib.import_module, args=["gateway.http.server"], daemon=True)
            preparing.start()
            fleet.wait_ready(progress.say)
            fleet.start_operator(progress.say)
            preparing.join()

            def announce(url: str) -> None:
                assert fleet is not None
                fleet.announce(console.here(url))
                progress.say(console.ready(url, settings, models))

            with further_processes(fleet.settings, arguments) as peers:
                run_gateway(fleet.settings, fleet.coordinator.info(), fleet.coordinator, announce, arguments, peers)
            return OK
        except CommandError as error:
            return fail(str(error), FAILED)
        except OSError as error:
            return fail(f"{settings.gateway.host}:{settings.gateway.port}: {error.strerror or error}", FAILED)
        finally:
            forced.armed = True
            if fleet is not None:
                progress.say("stopping")
                fleet.stop()
                progress.say("stopped")


def gateway(arguments: list[str]) -> int:
    """Runs a further gateway for a running fleet, with the fleet's settings and the `--gateway-*` settings given here."""
    loaded = sources.load(arguments, "outrider gateway", "Starts a further gateway for a running fleet.")
    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    progress = console.Progress()
    from backend import tracing

    with joined_fleet(loaded) as (settings, info, coordinator):
        tracing.check(settings.tracing)
        check_keys(settings.gateway, type(settings).model_validate_json(info.settings_json).gateway)
        check_gateway(settings)
        if not Path(info.models.target_dir).is_dir():
            return fail(f"this machine has no {info.models.target_dir}, the directory of the fleet's model", FAILED)

        def announce(url: str) -> None:
            progress.say(console.ready(url, settings, info.models))

        try:
            with further_processes(settings, arguments) as peers:
                run_gateway(settings, info, coordinator, announce, arguments, peers)
        except OSError as error:
            return fail(f"{settings.gateway.host}:{settings.gateway.port}: {error.strerror or error}", FAILED)
    return OK


def status(arguments: list[str]) -> int:
    """Shows the members of a running fleet: `outrider status [NAMESPACE, PID or --port PORT] [--json]`."""
    as_json = "--json" in arguments
    rest = [argument for argument in arguments if argument != "--json"]
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    description = "Shows a running fleet: [NAMESPACE, PID or --port N] [--json] [--ray-address ADDRESS --ray-namespace NAME]."
    loaded = sources.load(rest, "outrider status", description)
    from backend.launch.finding import found_fleet

    with found_fleet(loaded, name) as (coordinator, _):
        snapshot = coordinator.snapshot()
    print(msgspec.json.format(msgspec.json.encode(snapshot)).decode() if as_json else console.table(snapshot))
    return OK


def administration(name: str, arguments: list[str]) -> int:
    with signals():
        administer.main(name, arguments)
    return OK


def check_config(arguments: list[str]) -> int:
    """Prints the settings in force as YAML, each with its source."""
    loaded = sources.load(arguments, "outrider check-config", "Shows the settings in force.")
    print(console.settings_yaml(loaded))
    from backend.models.resolve import check_without_download

    check_without_download(loaded.settings, lambda line: print(line, file=sys.stderr))
    return OK


def make_key(arguments: list[str]) -> int:
    """Prints a new key, once, and the entry for the keys file: `outrider make-key NAME`."""
    from gateway.auth import key_ring

    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("make-key: give a name for the key")
    try:
        key, entry = key_ring.make_key(arguments[0])
    except key_ring.KeyFileError as error:
        raise ConfigError(f"make-key: {error}") from None
    print(f"# The key, shown this once:\n# {key}\n# Add this below `keys:` in gateway.keys_file:\n{entry}", end="")
    return OK


def reload(arguments: list[str]) -> int:
    """Has a running gateway read keys, limits and routing again: `outrider reload [NAMESPACE or PID] [--name value ...]`."""
    from backend.launch import state
    from gateway.cli import reload as reloading

    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    loaded = sources.load(rest, "outrider reload", "Has a gateway read its keys, limits and routing again: [NAMESPACE or PID].")
    section = loaded.settings.gateway
    # A gateway named by its address may run anywhere.  Otherwise it is the one of an `outrider serve` on this host.
    named = any(("gateway", each) in loaded.origins for each in ("host", "port", "uds"))
    url = reloading.url_of(section) if named and name is None else state.find(name).url
    for line in reloading.reload(url, section):
        print(line)
    return OK


def records(arguments: list[str]) -> int:
    """Summarises, draws and converts records."""
    from backend.records.main import main

    main(arguments, print, lambda line: print(f"outrider: {line}", file=sys.stderr))
    return OK


def trace(arguments: list[str]) -> int:
    """Makes traces."""
    from gateway.rollout.main import trace

    trace(arguments, print)
    return OK


def apart(point: EntryPoint, arguments: list[str]) -> int:
    """Runs a command that ends by itself: a function of the arguments, and of what prints its progress."""
    with signals():
        failed = point.load()(arguments, console.Progress().say)
    return FAILED if failed else OK


def ours(place: str) -> Callable[[list[str]], int]:
    """The command at this place, which is imported when it runs; so nothing that serves imports the laboratory."""
    return partial(apart, EntryPoint("", place, ""))


OWN = "(it has options of its own)"
COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "serve": ("start a fleet and its gateway, until Ctrl-C", serve),
    "gateway": ("start a further gateway for a running fleet", gateway),
    "status": ("show a running fleet", status),
    "check-config": ("show the settings in force and where each came from", check_config),
    "make-key": ("make an API key and its entry for the keys file", make_key),
    "reload": ("have a running gateway read its keys, limits and routing again", reload),
    "records": ("sum up, draw, join or export what verifiers wrote down", records),
    "bench": (f"measure every mode on this machine {OWN}", ours("backend.lab.bench.main:main")),
    "run-batch": (f"carry out a file of OpenAI batch requests at a gateway {OWN}", ours("gateway.cli.run_batch:main")),
    "rollout": (
        f"run a trace's prompts over a fleet of its own, with a row of every step {OWN}",
        ours("gateway.rollout.main:rollout"),
    ),
    "trace": (f"make traces {OWN}", trace),
    "train-drafter": (f"train a head for a model from prompts {OWN}", ours("gateway.cli.train_drafter:main")),
    "train-demo": ("train the built-in demo models again", ours("backend.lab.demo.__main__:main")),
    "selfcheck": ("check and time a drafter on this machine's GPU", ours("backend.lab.selfcheck:main")),
}
CHANGES = {name: (summary, partial(administration, name)) for name, summary in administer.SUMMARIES.items()}
"""Each command's summary, and the function that runs it."""
