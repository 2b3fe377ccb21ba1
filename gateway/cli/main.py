"""The command line: `outrider serve | gateway | status | ...`, see `COMMANDS`.

`serve` is the launcher and the gateway in one process: it starts the fleet (Ray actors), imports vLLM while the engines load,
serves HTTP from this process's main thread, and ends everything it started.  The heavy imports are inside the commands, so that
help, version and configuration errors come at once.  Wrong user input gives one line on stderr and exit status 2; a failure at
run time gives one line and exit status 1.
"""

import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec

from backend.config import sources
from backend.config.logs import configure_logging
from backend.config.sources import CommandError, ConfigError
from gateway.cli import administer, console
from gateway.cli.preflight import check_gateway, check_keys, here, url_of
from gateway.cli.processes import GATEWAY_PROCESS, further_processes, gateway_process, joined_fleet, run_gateway
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
        return commands.get(given[0], gateway_process)(given[1:]) or OK
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
    say = console.progress()
    configure_logging(settings.log_level, settings.log_format)
    with signals() as forced:
        from backend import tracing
        from backend.models.resolve import resolve

        models = resolve(settings, say)
        say(console.plan_line(settings, models))
        check_gateway(settings)
        tracing.check(settings.tracing)
        from backend.launch.fleet import LaunchedFleet, prepare_process
        from backend.launch.operator import Operator

        fleet: LaunchedFleet | None = None
        try:
            fleet = LaunchedFleet.launch(settings, models, say)
            prepare_process()
            # An error is raised again where the module is used.
            preparing = Thread(target=importlib.import_module, args=["gateway.http.server"], daemon=True)
            preparing.start()
            fleet.wait_ready(say)
            Operator(fleet, say).start()
            preparing.join()

            def announce(url: str) -> None:
                assert fleet is not None
                fleet.announce(here(url))
                say(console.ready(url, settings, models))

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
                say("stopping")
                fleet.stop()
                say("stopped")


def gateway(arguments: list[str]) -> None:
    """Runs a further gateway for a running fleet, with the fleet's settings and the `--gateway-*` settings given here."""
    loaded = sources.load(arguments, "outrider gateway", "Starts a further gateway for a running fleet.")
    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    say = console.progress()
    from backend import tracing

    with joined_fleet(loaded) as (settings, info, coordinator):
        tracing.check(settings.tracing)
        check_keys(settings.gateway, type(settings).model_validate_json(info.settings_json).gateway)
        check_gateway(settings)
        if not Path(info.models.target_dir).is_dir():
            raise CommandError(f"this machine has no {info.models.target_dir}, the directory of the fleet's model")

        def announce(url: str) -> None:
            say(console.ready(url, settings, info.models))

        try:
            with further_processes(settings, arguments) as peers:
                run_gateway(settings, info, coordinator, announce, arguments, peers)
        except OSError as error:
            raise CommandError(f"{settings.gateway.host}:{settings.gateway.port}: {error.strerror or error}") from error


def status(arguments: list[str]) -> None:
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


def check_config(arguments: list[str]) -> None:
    """Prints the settings in force as YAML, each with its source."""
    loaded = sources.load(arguments, "outrider check-config", "Shows the settings in force.")
    print(console.settings_yaml(loaded))
    from backend.models.resolve import check_without_download

    check_without_download(loaded.settings, lambda line: print(line, file=sys.stderr))


def make_key(arguments: list[str]) -> None:
    """Prints a new key, once, and the entry for the keys file: `outrider make-key NAME`."""
    from gateway.auth import key_ring

    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("make-key: give a name for the key")
    try:
        key, entry = key_ring.make_key(arguments[0])
    except key_ring.KeyFileError as error:
        raise ConfigError(f"make-key: {error}") from None
    print(f"# The key, shown this once:\n# {key}\n# Add this below `keys:` in gateway.keys_file:\n{entry}", end="")


def reload(arguments: list[str]) -> None:
    """Has a running gateway read keys, limits and routing again: `outrider reload [NAMESPACE or PID] [--name value ...]`."""
    from backend.launch import state
    from gateway.cli import reload as reloading

    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    loaded = sources.load(rest, "outrider reload", "Has a gateway read its keys, limits and routing again: [NAMESPACE or PID].")
    section = loaded.settings.gateway
    # A gateway named by its address may run anywhere.  Otherwise it is the one of an `outrider serve` on this host.
    named = any(("gateway", each) in loaded.origins for each in ("host", "port"))
    url = here(url_of(section)) if named and name is None else state.find(name).url
    for line in reloading.reload(url, section):
        print(line)


def records(arguments: list[str]) -> None:
    """Summarises, draws and converts records."""
    from backend.records.main import main

    main(arguments, print, lambda line: print(f"outrider: {line}", file=sys.stderr))


def trace(arguments: list[str]) -> None:
    """Makes traces."""
    from gateway.rollout.main import trace

    trace(arguments, print)


def apart(place: str, arguments: list[str]) -> int | None:
    """Runs a command that ends by itself: the function at `place`, of the arguments and of what prints its progress.

    It is found by name, because no serving code may import the laboratory.
    """
    with signals():
        return FAILED if pkgutil.resolve_name(place)(arguments, console.progress()) else None


OWN = "(it has options of its own)"
COMMANDS: dict[str, tuple[str, Callable[[list[str]], int | None]]] = {
    "serve": ("start a fleet and its gateway, until Ctrl-C", serve),
    "gateway": ("start a further gateway for a running fleet", gateway),
    "status": ("show a running fleet", status),
    "check-config": ("show the settings in force and where each came from", check_config),
    "make-key": ("make an API key and its entry for the keys file", make_key),
    "reload": ("have a running gateway read its keys, limits and routing again", reload),
    "records": ("sum up, draw, join or export what verifiers wrote down", records),
    "bench": (f"measure every mode on this machine {OWN}", partial(apart, "backend.lab.bench.main:main")),
    "run-batch": (f"carry out a file of OpenAI batch requests at a gateway {OWN}", partial(apart, "outrider.run_batch:main")),
    "rollout": (
        f"run a trace's prompts over a fleet of its own, with a row of every step {OWN}",
        partial(apart, "gateway.rollout.main:rollout"),
    ),
    "trace": (f"make traces {OWN}", trace),
    "train-drafter": (f"train a head for a model from prompts {OWN}", partial(apart, "backend.lab.train_drafter:main")),
    "train-demo": ("train the built-in demo models again", partial(apart, "backend.lab.demo.__main__:main")),
    "selfcheck": ("check and time a drafter on this machine's GPU", partial(apart, "backend.lab.selfcheck:main")),
}
CHANGES = {name: (summary, partial(administer.main, name)) for name, summary in administer.SUMMARIES.items()}
"""Each command's summary, and the function that runs it."""
