"""Keys, limits and routing are read again while requests are served: all of what was read, or nothing."""

import asyncio
import contextlib
from typing import Any

import httpx
import yaml

from backend.config import Settings
from backend.config.sources import merge, read_yaml
from gateway.auth.key_ring import make_key
from gateway.cli import main as cli
from gateway.peers import Peers
from gateway.reload import apply_rules, read_rules
from tests.support.fake_verifier import eventually, gated
from tests.support.running_gateway import COMPLETION, refusal, running_gateway

ADMIN = {"authorization": "Bearer adm"}


class Files:
    """A settings file and a keys file."""

    def __init__(self, folder):
        self.settings = folder / "fleet.yaml"
        self.keys = folder / "keys.yaml"
        self.first: dict[str, Any] = {"admin_key": "adm", "keys_file": str(self.keys), "port": 0, "state_dir": str(folder)}

    def write(self, entries, **gateway):
        self.keys.write_text(entries if isinstance(entries, str) else "keys:\n" + "".join(entries))
        self.settings.write_text(yaml.safe_dump({"gateway": {**self.first, **gateway}}))

    def read(self) -> Settings:
        return merge([read_yaml(self.settings)]).settings


async def test_all_of_it_or_nothing(tmp_path, caplog, monkeypatch):
    files = Files(tmp_path)
    (old, old_entry), (new, new_entry) = make_key("old"), make_key("new")
    files.write([old_entry])
    async with running_gateway(read_settings=files.read, **files.first) as running:
        http, core, gateway = running.http, running.core, running.server.gateway
        preferred: list[str] = []
        monkeypatch.setattr(core.choosing, "prefer", preferred.append)

        async def opens(key):
            answer = await http.post("/v1/completions", json=COMPLETION, headers={"authorization": f"Bearer {key}"})
            return answer.status_code == 200

        assert await opens(old)
        gate = asyncio.Event()
        running.verifier.behaviour = gated(gate)
        open_request = asyncio.ensure_future(opens(old))
        await eventually(lambda: len(running.verifier.sequences) == 2)

        files.write([new_entry], affinity="both", max_in_flight=7, queue_wait_s=3, served_model_name="other")
        assert (await http.post("/admin/reload", json={})).status_code == 401
        done = await http.post("/admin/reload", json={}, headers=ADMIN)
        assert done.json() == {
            "changed": ["gateway.max_in_flight", "gateway.queue_wait_s", "gateway.affinity"],
            "needs_restart": ["gateway.served_model_name"],
            "keys": 1,
        }
        assert preferred.pop() == "both"
        assert (gateway.settings.gateway.max_in_flight, core.gate.wait_s) == (7, 3)
        gate.set()
        assert await open_request, "what was open goes on"
        assert not await opens(old)
        assert await opens(new)

        before = gateway.settings
        for entries, changes in (
            ("keys: [", {"affinity": "none"}),
            ([new_entry, "    weight: -1\n"], {"max_in_flight": 9}),
            ([old_entry], {"max_in_flight": 0}),
            ([old_entry], {"max_inflight": 5}),
        ):
            files.write(entries, **changes)
            refused = await http.post("/admin/reload", json={}, headers=ADMIN)
            assert refusal(refused) == (400, "invalid_settings")
            assert "Nothing has changed" in refused.json()["error"]["message"]
            assert str(tmp_path) not in refused.text
            assert gateway.settings is before
            assert preferred == []
            assert await opens(new)
        assert "weight (new): input should be greater than 0" in caplog.text

        # Another admin key is in force at once.
        files.write([old_entry], admin_key="other")
        assert (await http.post("/admin/reload", json={}, headers=ADMIN)).status_code == 200
        assert (await http.post("/admin/reload", json={}, headers=ADMIN)).status_code == 401
        assert preferred.pop() == "none"


async def test_from_the_command_line(tmp_path, capsys):
    files = Files(tmp_path)
    old_entry, new_entry = make_key("old")[1], make_key("new")[1]
    files.write([old_entry])
    async with running_gateway(read_settings=files.read, **files.first) as running:
        files.write([old_entry, new_entry])
        address = httpx.URL(running.server.url)
        flags = ["--host", address.host, "--port", str(address.port), "--gateway-admin-key", "adm"]
        assert await asyncio.to_thread(cli.main, ["reload", *flags]) == 0
        assert capsys.readouterr().out == "2 keys; changed: nothing else\n"
        files.write("keys: 5")
        assert await asyncio.to_thread(cli.main, ["reload", *flags]) == 1
        assert "Nothing has changed: <path>: keys: input should be a valid list" in capsys.readouterr().err


async def test_what_the_process_that_is_asked_has_read_all_have(tmp_path):
    all_files = [Files(tmp_path / name) for name in ("a", "b")]
    entry = make_key("one")[1]
    async with contextlib.AsyncExitStack() as stack:
        gateways = []
        for index, files in enumerate(all_files):
            files.keys.parent.mkdir()
            files.write([entry])
            peers = Peers(tmp_path, index, 2)
            running = await stack.enter_async_context(running_gateway(read_settings=files.read, peers=peers, **files.first))
            gateways.append(running.server.gateway)
            http = running.http

        def limits() -> list[int]:
            return [gateway.settings.gateway.max_in_flight for gateway in gateways]

        before = limits()
        all_files[0].write("keys: 5")
        all_files[1].write("keys: 6", max_in_flight=7)
        assert (await http.post("/admin/reload", json={}, headers=ADMIN)).status_code == 400
        assert limits() == before
        key, other_entry = make_key("other")
        all_files[1].write([entry, other_entry], max_in_flight=7)
        assert (await http.post("/admin/reload", json={}, headers=ADMIN)).json()["keys"] == 2
        assert limits() == [7, 7]
        scope = {"headers": [(b"authorization", f"Bearer {key}".encode())]}
        assert [found and found.name for found in (gateway.ring.find(scope) for gateway in gateways)] == ["other"] * 2


async def test_of_two_reloads_at_a_time_the_later_one_stands(tmp_path):
    files = Files(tmp_path)
    files.write([make_key("one")[1]])
    async with running_gateway(read_settings=files.read, **files.first) as running:
        gateway = running.server.gateway
        earlier = await read_rules(gateway)
        files.write([make_key("one")[1]], max_in_flight=7)
        apply_rules(gateway, await read_rules(gateway))
        apply_rules(gateway, earlier)
        assert gateway.settings.gateway.max_in_flight == 7


async def test_a_process_that_is_starting_misses_no_reload(tmp_path):
    files = Files(tmp_path)
    # It has read the settings, and did not answer the other process, which has reloaded since.
    files.write([make_key("one")[1]], max_in_flight=7)
    async with running_gateway(read_settings=files.read, peers=Peers(tmp_path, 1, 2), **files.first) as running:
        await eventually(lambda: running.server.gateway.settings.gateway.max_in_flight == 7)
