import hashlib

import pytest

from gateway.auth.caller import ANYBODY, Priority
from gateway.auth.key_ring import RESERVED, KeyFileError, KeyRing, make_key, read_entries


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


def scope(header=None, name="authorization"):
    return {"type": "http", "headers": [] if header is None else [(name.encode(), header.encode())]}


def ring(tmp_path, text, **settings):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    return KeyRing(entries=read_entries(file), **settings)


def test_an_entry_says_all_there_is_of_a_key(tmp_path):
    keys = ring(
        tmp_path,
        f"""
keys:
  - name: team
    sha256: [{digest("old")}, {digest("new")}]
    models: [demo, mine]
    requests_per_minute: 60
    tokens_per_minute: 1000
    concurrent_requests: 3
    weight: 2.5
    priority: batch
    rights: [admin, metrics]
    learn: false
""",
    )
    caller = keys.find(scope("Bearer old"))
    assert caller is not None
    assert caller is keys.find(scope("bearer  new")) is keys.find(scope("new", "x-api-key"))
    for wrong in (None, "Bearer nope", "Bearer newx", "Basic new", "Bearer ", f"Bearer {digest('new')}"):
        assert keys.find(scope(wrong)) is None, wrong
    key, entry = make_key("alice")
    assert (key in entry, len(key) > 40) == (False, True)
    assert caller.may_use("mine")
    assert not caller.may_use("other")
    assert (caller.requests_per_minute, caller.tokens_per_minute, caller.concurrent_requests) == (60, 1000, 3)
    assert (caller.weight, caller.priority, caller.admin, caller.metrics) == (2.5, Priority.BATCH, True, True)
    assert not caller.learn
    assert keys.find_administrator(scope("Bearer new")) is caller
    assert keys.has_admin
    assert keys.guards_metrics


def test_no_entry_has_a_name_of_the_servers_own():
    keys = KeyRing("api", "admin")
    callers = (keys.find(scope("Bearer api")), keys.find_administrator(scope("Bearer admin")))
    assert {caller.name for caller in callers if caller is not None} | {"anybody", "nobody"} == RESERVED
    for name in RESERVED:
        with pytest.raises(KeyFileError, match="the server's own"):
            make_key(name)


@pytest.mark.parametrize(
    ("api", "admin", "opened", "administers"),
    [
        (None, None, [None, "Bearer x"], []),
        ("api", "admin", ["Bearer api"], ["Bearer admin"]),
        ("one", "one", ["Bearer one"], ["Bearer one"]),
        ("", "", [], []),
    ],
)
def test_single_keys_go_on_working(api, admin, opened, administers):
    keys = KeyRing(api, admin)
    for header in (None, "Bearer ", "Bearer x", "Bearer api", "Bearer admin", "Bearer one"):
        assert (keys.find(scope(header)) is not None) == (header in opened or api is None), header
        assert (keys.find_administrator(scope(header)) is not None) == (header in administers), header
    assert (keys.find(scope()) is ANYBODY) == (api is None)


ENTRY = f"  - name: a\n    sha256: {digest('a')}\n"
WRONG = {
    "keys: [": "not YAML",
    f"keys:\n{ENTRY}    weight: !!int secret\n": "not YAML",
    f"keys:\n{ENTRY}    until: 2026-02-31\n": "keys.0.until (a): extra inputs",
    "[]": "the file: ",
    "keys:\n  - name: a\n": "keys.0.sha256 (a): field required",
    f"keys:\n{ENTRY}    weigth: 2\n": "keys.0.weigth (a): extra inputs",
    f"keys:\n{ENTRY}    weight: 0\n": "keys.0.weight (a): input should be greater than 0",
    "keys:\n  - name: a\n    sha256: secret\n": "expected 64 lower-case hexadecimal digits",
    f"keys:\n  - name: a b\n    sha256: {digest('a')}\n": "expected up to 64 letters",
    f"keys:\n  - name: admin-key\n    sha256: {digest('a')}\n": "this name is the server's own",
    f"keys:\n{ENTRY}{ENTRY}": "the name a is there twice",
    f"keys:\n{ENTRY}  - name: b\n    sha256: {digest('a')}\n": "the key is there twice",
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_is_wrong_with_a_file_is_said_without_its_secrets(tmp_path, text):
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_entries(tmp_path / "none.yaml")
    with pytest.raises(KeyFileError) as error:
        ring(tmp_path, text)
    assert WRONG[text] in str(error.value)
    assert "secret" not in str(error.value)
    assert digest("a") not in str(error.value)
