"""The command line: `outrider serve | gateway | status | ...`, see `usage.py`.

`serve` is the launcher and the gateway in one process: it starts the fleet (Ray actors), imports vLLM while the engines load,
serves HTTP from this process's main thread, and ends everything it started.  The heavy imports are inside the commands, so that
help, version and configuration errors come at once.  What is wrong with the user's input is one line on stderr and exit 2; what
goes wrong at run time is one line and exit 1.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from backend.config import sources
from backend.config.sources import ConfigError, Loaded
from gateway import administer, present, tools
from gateway.exits import FAILED, INTERRUPTED, MISUSED, OK, configure_logging, fail
from gateway.signals import Interrupted, signals
from gateway.usage import USAGE

if TYPE_CHECKING:
    from backend.config import Settings
    from backend.coordinator.actor import CoordinatorHandle
    from backend.models.resolve import ResolvedModels
    from backend.transport import ServerKeys
    from gateway.peers import Peers

GATEWAY_PROCESS = "gateway-process"
"""What the first gateway process on a port starts the others with; not for people."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": serve,
        "gateway": gateway,
        "status": status,
        "check-config": check_config,
        "make-key": make_key,
        "reload": reload,
        "records": tools.records,
        "report": tools.report,
        "rollout": tools.rollout,
        "run-batch": tools.run_batch,
        "trace": tools.trace,
        "train-drafter": tools.train_drafter,
        **{name: partial(tools.laboratory, name) for name in tools.LABORATORY},
        **{name: partial(administration, name) for name in administer.SUMMARIES},
    }
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return OK if given else MISUSED
    if given[0] in ("-V", "--version", "version"):
        print(f"outrider {version()}")
        return OK
    if given[0] not in commands and given[0] != GATEWAY_PROCESS:
        return fail(f"no command {given[0]!r}; there are {', '.join(commands)}", MISUSED)
    try:
        return commands.get(given[0], gateway_process)(given[1:])
    except ConfigError as error:
        return fail(str(error), MISUSED)
    except (Interrupted, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        return FAILED


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def serve(arguments: list[str]) -> int:
    """Starts a fleet and serves it."""
    loaded = sources.load(arguments, "outrider serve", "Starts verifiers, drafters and a gateway.")
    settings = loaded.settings
    progress = present.Progress()
    configure_logging(settings.log_level, settings.log_format)
    with signals() as forced:
        models = _resolved(settings, progress)
        _check_gateway(settings)
        _check_tracing(settings)
        from backend.config.runtime import StateError
        from backend.launch.cluster import ClusterError
        from backend.launch.fleet import Fleet
        from backend.launch.plan import PlanError
        from backend.launch.processes import LaunchError

        fleet: Fleet | None = None
        try:
            fleet = Fleet.launch(settings, models, progress.say)
            _prepare_vllm()
            preparing = _import_in_background("gateway.server")
            fleet.wait_ready(progress.say)
            fleet.operate(progress.say)
            preparing.join()

            def announce(url: str) -> None:
                assert fleet is not None
                fleet.announce(url)
                progress.say(present.ready(url, settings, models))

            info = fleet.coordinator.info()
            with _peers(fleet.settings, arguments) as peers:
                _run_gateway(fleet.settings, models, fleet.coordinator, info.fleet_keys, announce, arguments, peers)
            return OK
        except (ClusterError, LaunchError, PlanError, StateError) as error:
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
    """A gateway for a fleet that runs already; it takes the fleet's settings, and its own `--gateway-*` ones."""
    loaded = sources.load(arguments, "outrider gateway", "Starts a further gateway for a running fleet.")
    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    progress = present.Progress()
    with signals() as forced, _found_fleet(loaded, None) as coordinator:
        _prepare_vllm()
        info = coordinator.info()
        theirs = type(loaded.settings).model_validate_json(info.settings_json)
        settings = theirs.model_copy(update={"gateway": loaded.settings.gateway})
        _check_tracing(settings)
        _check_files(settings)

        def announce(url: str) -> None:
            progress.say(present.ready(url, settings, info.models))

        try:
            with _peers(settings, arguments) as peers:
                _run_gateway(settings, info.models, coordinator, info.fleet_keys, announce, arguments, peers)
        except OSError as error:
            return fail(f"{settings.gateway.host}:{settings.gateway.port}: {error.strerror or error}", FAILED)
        finally:
            forced.armed = True
        return OK


def gateway_process(arguments: list[str]) -> int:
    """One more process on a gateway's port: `FOLDER NUMBER PORT RAY_ADDRESS NAMESPACE` and the first one's arguments."""
    from pathlib import Path

    folder, number, port, address, namespace, *rest = arguments
    loaded = sources.load(rest, GATEWAY_PROCESS)
    ray = loaded.settings.ray.model_copy(update={"address": address, "namespace": namespace})
    loaded = Loaded(loaded.settings.model_copy(update={"ray": ray}), loaded.origins)
    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    threading.Thread(target=_end_with_input, name="first process", daemon=True).start()
    with signals() as forced, _found_fleet(loaded, None) as coordinator:
        _prepare_vllm()
        from gateway.peers import Peers

        info = coordinator.info()
        theirs = type(loaded.settings).model_validate_json(info.settings_json)
        settings = theirs.model_copy(update={"gateway": loaded.settings.gateway})
        peers = Peers(Path(folder), int(number), settings.gateway.processes, port=int(port))
        try:
            _run_gateway(settings, info.models, coordinator, info.fleet_keys, None, rest, peers)
        finally:
            forced.armed = True
        return OK


def status(arguments: list[str]) -> int:
    """Shows the members of a running fleet: `outrider status [NAMESPACE or PID] [--json]`."""
    as_json = "--json" in arguments
    rest = [argument for argument in arguments if argument != "--json"]
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    description = "Shows a running fleet: [NAMESPACE or PID] [--json] [--ray-address ADDRESS --ray-namespace NAME]."
    loaded = sources.load(rest, "outrider status", description)
    with _found_fleet(loaded, name) as coordinator:
        snapshot = coordinator.snapshot()
    print(present.snapshot_json(snapshot) if as_json else present.table(snapshot))
    return OK


def administration(name: str, arguments: list[str]) -> int:
    """Changes a running fleet."""
    with signals():
        return administer.main(name, arguments, _found_fleet)


def check_config(arguments: list[str]) -> int:
    """Prints the settings in force as YAML, each with its source."""
    loaded = sources.load(arguments, "outrider check-config", "Shows the settings in force.")
    print(present.settings_yaml(loaded))
    from backend.models.resolve import ModelError, check_without_download

    try:
        check_without_download(loaded.settings, lambda line: print(line, file=sys.stderr))
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return OK


def make_key(arguments: list[str]) -> int:
    """Prints a new key, once, and the entry for the keys file: `outrider make-key NAME`."""
    from gateway.keys import ring

    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("make-key: give a name for the key")
    try:
        key, entry = ring.make_key(arguments[0])
    except ring.KeyFileError as error:
        raise ConfigError(f"make-key: {error}") from None
    print(f"# The key, shown this once:\n# {key}\n# Add this below `keys:` in gateway.keys_file:\n{entry}", end="")
    return OK


def reload(arguments: list[str]) -> int:
    """Has a running gateway read keys, limits and routing again: `outrider reload [NAMESPACE or PID] [--name value ...]`."""
    from backend.config.runtime import StateError
    from backend.launch import state
    from gateway import reloading

    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    loaded = sources.load(rest, "outrider reload", "Has a gateway read its keys, limits and routing again: [NAMESPACE or PID].")
    asked = loaded.settings.gateway
    try:
        # One that is named by its address may be any; others are those of `outrider serve` on this host.
        named = any(("gateway", each) in loaded.origins for each in ("host", "port", "uds"))
        url = reloading.url_of(asked) if named and name is None else state.find(name).url
        for line in reloading.reload(url, asked):
            print(line)
    except (StateError, reloading.ReloadFailed) as error:
        return fail(str(error), FAILED)
    return OK


# What the commands share.


def _resolved(settings: Settings, progress: present.Progress) -> ResolvedModels:
    from backend.models.resolve import ModelError, resolve

    try:
        models = resolve(settings, progress.say)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    progress.say(present.plan_line(settings, models))
    return models


def _read_again(arguments: list[str]) -> Settings:
    return sources.load(arguments).settings


def _check_gateway(settings: Settings) -> None:
    """Finds out now, and not after the models are loaded, that the port is taken, or keys and certificates are wrong."""
    import socket

    _check_files(settings)
    if settings.gateway.uds:
        return
    host, port = settings.gateway.host, settings.gateway.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error} (--port 0 takes a free one)") from error


def _check_files(settings: Settings) -> None:
    """Finds out now that the keys file or the certificate is wrong."""
    import ssl
    from pathlib import Path

    from gateway.keys.ring import KeyFileError, read_entries

    asked = settings.gateway
    try:
        if asked.keys_file:
            read_entries(Path(asked.keys_file).expanduser())
        if asked.tls_cert:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                Path(asked.tls_cert).expanduser(), Path(asked.tls_key).expanduser() if asked.tls_key else None
            )
        elif asked.tls_key:
            raise ConfigError("gateway.tls_key needs gateway.tls_cert")
    except KeyFileError as error:
        raise ConfigError(f"gateway.keys_file: {error}") from None
    except OSError as error:
        # Of both errors of a certificate, ssl.SSLError is one too.
        raise ConfigError(f"gateway.tls_cert, tls_key: {error.strerror or error}") from None


def _check_tracing(settings: Settings) -> None:
    """Finds out now that tracing was asked for and its packages are missing."""
    from backend import tracing

    try:
        tracing.check(settings.tracing)
    except tracing.TracingError as error:
        raise ConfigError(str(error)) from error


def _prepare_vllm() -> None:
    """The gateway's vLLM has no engine: what it would log about one is noise."""
    from backend.config import environment
    from backend.launch.fleet import member_environment

    environment.export({"VLLM_LOGGING_LEVEL": "ERROR"}, override=False)
    environment.export(member_environment(offline=True))


def _import_in_background(module: str) -> threading.Thread:
    """Imports `module` in a thread; an import error comes again where the module is used."""

    def work() -> None:
        try:
            importlib.import_module(module)
        except Exception:
            logging.getLogger(__name__).debug("importing %s failed", module, exc_info=True)

    thread = threading.Thread(target=work, name="import", daemon=True)
    thread.start()
    return thread


def _run_gateway(
    settings: Settings,
    models: ResolvedModels,
    coordinator: CoordinatorHandle,
    fleet_keys: ServerKeys | None,
    announce: Callable[[str], None] | None,
    arguments: list[str],
    peers: Peers | None,
) -> None:
    """Serves HTTP until a signal; the signals are the server's own meanwhile."""
    from backend.config import environment
    from backend.coordinator import CoordinatorUnavailable
    from backend.launch.fleet import gateway_member, member_environment
    from backend.transport import Wire

    environment.export(member_environment(offline=True))
    from gateway.directory import CoordinatorDirectory
    from gateway.server import GatewayServer

    member = gateway_member(models.name)
    try:
        server = GatewayServer(
            settings,
            CoordinatorDirectory(coordinator, member),
            models.target_dir,
            model_name=models.name,
            wire=Wire(fleet_keys, node_id=member.node_id),
            on_ready=announce,
            read_settings=lambda: _read_again(arguments),
            peers=peers,
        )
        server.run()
    finally:
        try:
            coordinator.deregister(member.id, member.incarnation)
        except CoordinatorUnavailable:
            logging.getLogger(__name__).debug("the coordinator was gone first")


@contextmanager
def _peers(settings: Settings, arguments: list[str]) -> Iterator[Peers | None]:
    """The further processes that the settings ask for, and the folder they meet in."""
    count = settings.gateway.processes
    if count == 1:
        yield None
        return
    import tempfile
    from pathlib import Path

    from backend.config.runtime import home
    from backend.launch.fleet import joined
    from gateway.peers import Peers

    # The folder is private to this user.
    with tempfile.TemporaryDirectory(prefix="g-", dir=home()) as folder:

        def command(number: int, port: int) -> list[str]:
            own = [sys.executable, "-m", "gateway.cli", GATEWAY_PROCESS]
            return [*own, folder, str(number), str(port), *joined(), *arguments]

        yield Peers(Path(folder), 0, count, command=command)


def _end_with_input() -> None:
    """Drains this process when the one that started it is gone."""
    import os
    import signal

    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _found_fleet(loaded: Loaded, name: str | None) -> Iterator[CoordinatorHandle]:
    """The coordinator of a running fleet: at `--ray-address`, or the one on this host.  Turns failures into exit 1."""
    from backend.config.runtime import StateError
    from backend.coordinator import CoordinatorUnavailable
    from backend.launch.cluster import ClusterError
    from backend.launch.finding import found_fleet

    try:
        with found_fleet(loaded, name) as (coordinator, _):
            yield coordinator
    except (ClusterError, CoordinatorUnavailable, StateError) as error:
        sys.exit(fail(str(error), FAILED))


if __name__ == "__main__":
    sys.exit(main())
