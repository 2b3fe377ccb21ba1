"""Stores responses and conversations in one SQLite file, bounded in bytes and in age.

A stored response has its own input items and a link to the response before it.  When a response is deleted, later responses
that link to it cannot be continued.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.http.errors import BadRequest, NotFound
from gateway.requests.limits import MAX_ITEMS
from gateway.storage.sqlite import Database, lock, transaction

Item = dict[str, Any]
Row = tuple[int, str]
"""A number and an event as JSON."""

LIFETIME_S = 30 * 86400
"""Seconds that a response is kept, as with OpenAI; a conversation is kept as long after its last use."""
INTERRUPTED = {"code": "server_error", "message": "The server was stopped while it made this response."}
UNFINISHED = ("queued", "in_progress")
_IS_UNFINISHED = f"json_extract(body, '$.status') IN {UNFINISHED}"
MAX_HISTORY_BYTES = 1 << 25
"""Most bytes of a conversation's items, or of all responses in a chain; every request that continues them reads them all."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, created REAL, previous TEXT, input TEXT, body TEXT, maker TEXT);
CREATE INDEX IF NOT EXISTS responses_created ON responses (created);
CREATE TABLE IF NOT EXISTS outputs (id TEXT PRIMARY KEY, response TEXT, owner TEXT, item TEXT);
CREATE INDEX IF NOT EXISTS outputs_response ON outputs (response);
CREATE TABLE IF NOT EXISTS events (response TEXT, number INTEGER, event TEXT, PRIMARY KEY (response, number));
CREATE TABLE IF NOT EXISTS conversations (id TEXT PRIMARY KEY, owner TEXT, created REAL, metadata TEXT, used REAL);
CREATE INDEX IF NOT EXISTS conversations_used ON conversations (used);
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY, conversation TEXT, id TEXT, item TEXT, UNIQUE (conversation, id));
CREATE TRIGGER IF NOT EXISTS forget_response AFTER DELETE ON responses BEGIN
    DELETE FROM events WHERE response = OLD.id;
    DELETE FROM outputs WHERE response = OLD.id;
END;
CREATE TRIGGER IF NOT EXISTS forget_conversation AFTER DELETE ON conversations BEGIN
    DELETE FROM items WHERE conversation = OLD.id;
END;
"""


@dataclass(frozen=True)
class StoredResponse:
    """A stored response: `body` is the object that clients get, `input` the items of its own request."""

    id: str
    owner: str
    previous: str | None
    input: list[Item]
    body: dict[str, Any]


class ResponseStore(Database):
    """The store.  Every method is one transaction.  A response or conversation is found only by its `owner`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, _SCHEMA)
        self._max_bytes = max_bytes
        self._makers, self._maker = path.parent / "makers", uuid.uuid4().hex
        self._makers.mkdir(mode=0o700, exist_ok=True)
        self._lock = lock(self._makers / self._maker)

    def close(self) -> None:
        """Waits for pending transactions, and closes the file."""
        super().close()
        (self._makers / self._maker).unlink(missing_ok=True)
        self._lock.close()

    # Responses

    @transaction
    def put(self, db: sqlite3.Connection, kept: StoredResponse) -> None:
        """Stores a new response.  Drops what is too old, or too much for the file."""
        items, body = json.dumps(kept.input), json.dumps(kept.body)
        insert = "INSERT INTO responses (id, owner, created, previous, input, body, maker) VALUES (?,?,?,?,?,?,?)"
        db.execute(insert, (kept.id, kept.owner, time.time(), kept.previous, items, body, self._maker))
        self._add_outputs(db, kept)

    @transaction
    def advance(self, db: sqlite3.Connection, kept: StoredResponse, events: Sequence[Row] = ()) -> bool:
        """Stores the new state of a response, with `events`; False if it has ended, by a cancellation say."""
        update = f"UPDATE responses SET body = ? WHERE id = ? AND {_IS_UNFINISHED}"
        if not db.execute(update, (json.dumps(kept.body), kept.id)).rowcount:
            return False
        _add_events(db, kept.id, events)
        self._add_outputs(db, kept)
        return True

    @transaction
    def get(self, db: sqlite3.Connection, response_id: str, owner: str) -> StoredResponse:
        """The response as it is now: one that a gateway left unfinished when it ended has failed.  Raises `NotFound`."""
        return self._response(db, response_id, owner)

    @transaction
    def unfinished(self, db: sqlite3.Connection, response_id: str) -> bool:
        """Whether some gateway generates it."""
        row = db.execute(f"SELECT maker FROM responses WHERE id = ? AND {_IS_UNFINISHED}", (response_id,)).fetchone()
        return row is not None and not self._is_over(row[0])

    @transaction
    def delete(self, db: sqlite3.Connection, response_id: str, owner: str) -> None:
        """Raises `NotFound`."""
        self._response(db, response_id, owner)
        db.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    @transaction
    def history(self, db: sqlite3.Connection, response_id: str, owner: str) -> list[Item]:
        """All input and output items up to this response and with it, oldest first.  Raises `NotFound`."""
        turns: list[list[Item]] = []
        at: str | None = response_id
        size = 0
        while at is not None:
            kept = self._response(db, at, owner, "previous_response_id")
            size += db.execute("SELECT length(input) + length(body) FROM responses WHERE id = ?", (at,)).fetchone()[0]
            if size > MAX_HISTORY_BYTES:
                message = f"This response and those before it are larger than {MAX_HISTORY_BYTES} bytes."
                raise BadRequest(message, param="previous_response_id", code="conversation_full")
            turns.append([*kept.input, *kept.body["output"]])
            at = kept.previous
        return [item for turn in reversed(turns) for item in turn]

    @transaction
    def resolve(self, db: sqlite3.Connection, items: list[Item], owner: str) -> list[Item]:
        """`items`, in which references to outputs of stored responses are replaced by these outputs.  Raises `NotFound`."""
        return [_output(db, item, owner) if item.get("type") == "item_reference" else item for item in items]

    # Events of streams in the background

    @transaction
    def add_events(self, db: sqlite3.Connection, response_id: str, events: Sequence[Row]) -> bool:
        """False if the response has ended."""
        if db.execute(f"SELECT 1 FROM responses WHERE id = ? AND {_IS_UNFINISHED}", (response_id,)).fetchone() is None:
            return False
        _add_events(db, response_id, events)
        return True

    @transaction
    def events(self, db: sqlite3.Connection, response_id: str, after: int) -> list[Row]:
        """Events with numbers greater than `after`."""
        query = "SELECT number, event FROM events WHERE response = ? AND number > ? ORDER BY number"
        return db.execute(query, (response_id, after)).fetchall()

    # Conversations

    @transaction
    def create_conversation(
        self, db: sqlite3.Connection, conversation_id: str, owner: str, metadata: dict[str, Any], items: list[Item]
    ) -> Item:
        now = time.time()
        row = (conversation_id, owner, now, json.dumps(metadata), now)
        db.execute("INSERT INTO conversations VALUES (?,?,?,?,?)", row)
        _add(db, conversation_id, items)
        self._make_room(db, now)
        return _conversation(db, conversation_id, owner)

    @transaction
    def conversation(self, db: sqlite3.Connection, conversation_id: str, owner: str) -> Item:
        """Raises `NotFound`."""
        return _conversation(db, conversation_id, owner)

    @transaction
    def update_conversation(self, db: sqlite3.Connection, conversation_id: str, owner: str, metadata: dict[str, Any]) -> Item:
        """Raises `NotFound`."""
        update = "UPDATE conversations SET metadata = ? WHERE id = ? AND owner = ?"
        db.execute(update, (json.dumps(metadata), conversation_id, owner))
        return _conversation(db, conversation_id, owner)

    @transaction
    def delete_conversation(self, db: sqlite3.Connection, conversation_id: str, owner: str) -> None:
        """Raises `NotFound`."""
        _conversation(db, conversation_id, owner)
        db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    @transaction
    def items(self, db: sqlite3.Connection, conversation_id: str, owner: str) -> list[Item]:
        """Oldest first.  Raises `NotFound`."""
        _conversation(db, conversation_id, owner)
        rows = db.execute("SELECT item FROM items WHERE conversation = ? ORDER BY number", (conversation_id,))
        return [json.loads(item) for (item,) in rows]

    @transaction
    def add_items(
        self, db: sqlite3.Connection, conversation_id: str, owner: str, items: list[Item], most: int | None = MAX_ITEMS
    ) -> None:
        """`most`: None keeps what was made already, however much there is.  Raises `NotFound` or `BadRequest`."""
        _conversation(db, conversation_id, owner)
        _add(db, conversation_id, items)
        query = "SELECT count(*), coalesce(sum(length(item)), 0) FROM items WHERE conversation = ?"
        held, size = db.execute(query, (conversation_id,)).fetchone()
        if most is not None and (held > most or size > MAX_HISTORY_BYTES):
            message = f"The conversation would have {held} items and {size} bytes; {most} and {MAX_HISTORY_BYTES} are the most."
            raise BadRequest(f"{message} Delete some, or begin another.", param="items", code="conversation_full")
        self._make_room(db, time.time())

    @transaction
    def delete_item(self, db: sqlite3.Connection, conversation_id: str, owner: str, item_id: str) -> None:
        """Raises `NotFound`."""
        _conversation(db, conversation_id, owner)
        gone = db.execute("DELETE FROM items WHERE conversation = ? AND id = ?", (conversation_id, item_id))
        if not gone.rowcount:
            raise NotFound("There is no such item in this conversation.", param="item_id")

    def _add_outputs(self, db: sqlite3.Connection, kept: StoredResponse) -> None:
        outputs = [(item["id"], kept.id, kept.owner, json.dumps(item)) for item in kept.body["output"]]
        db.executemany("INSERT OR REPLACE INTO outputs VALUES (?,?,?,?)", outputs)
        self._make_room(db, time.time())

    def _is_over(self, maker: str) -> bool:
        """Whether the gateway `maker` has ended.  Removes its lock then."""
        path = self._makers / maker
        try:
            lock(path).close()
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
        return True

    def _response(self, db: sqlite3.Connection, response_id: str, owner: str, param: str = "response_id") -> StoredResponse:
        query = "SELECT previous, input, body, maker FROM responses WHERE id = ? AND owner = ?"
        row = db.execute(query, (response_id, owner)).fetchone()
        if row is None:
            raise NotFound("There is no such response, or it is not kept any more.", param=param)
        previous, items, text, maker = row
        body = json.loads(text)
        if body["status"] in UNFINISHED and self._is_over(maker):
            body |= {"status": "failed", "error": INTERRUPTED}
        return StoredResponse(response_id, owner, previous, json.loads(items), body)

    def _make_room(self, db: sqlite3.Connection, now: float) -> None:
        """Drops what is too old.  Then drops the oldest tenth, again and again, while the file uses more bytes than allowed."""
        _drop(db, now - LIFETIME_S)
        for _ in range(10):
            pages, free = db.execute("PRAGMA page_count").fetchone()[0], db.execute("PRAGMA freelist_count").fetchone()[0]
            if (pages - free) * db.execute("PRAGMA page_size").fetchone()[0] <= self._max_bytes:
                return
            ages = "SELECT created AS at FROM responses UNION ALL SELECT used FROM conversations ORDER BY at"
            times = [at for (at,) in db.execute(ages)]
            _drop(db, times[len(times) // 10])


def _drop(db: sqlite3.Connection, until: float) -> None:
    db.execute("DELETE FROM responses WHERE created <= ?", (until,))
    db.execute("DELETE FROM conversations WHERE used <= ?", (until,))


def _output(db: sqlite3.Connection, reference: Item, owner: str) -> Item:
    row = db.execute("SELECT item FROM outputs WHERE id = ? AND owner = ?", (reference.get("id"), owner)).fetchone()
    if row is None:
        raise NotFound("An item reference leads to no item that is kept.", param="input")
    item: Item = json.loads(row[0])
    return item


def _add_events(db: sqlite3.Connection, response_id: str, events: Sequence[Row]) -> None:
    rows = [(response_id, number, event) for number, event in events]
    db.executemany("INSERT OR REPLACE INTO events VALUES (?,?,?)", rows)


def _conversation(db: sqlite3.Connection, conversation_id: str, owner: str) -> Item:
    # Whatever it is looked up for is a use.
    query = "UPDATE conversations SET used = ? WHERE id = ? AND owner = ? RETURNING created, metadata"
    rows = db.execute(query, (time.time(), conversation_id, owner)).fetchall()
    if not rows:
        raise NotFound("There is no such conversation, or it is not kept any more.", param="conversation")
    created, metadata = rows[0]
    return {"id": conversation_id, "object": "conversation", "created_at": int(created), "metadata": json.loads(metadata)}


def _add(db: sqlite3.Connection, conversation_id: str, items: list[Item]) -> None:
    rows = [(conversation_id, item["id"], json.dumps(item)) for item in items]
    db.executemany("INSERT OR REPLACE INTO items (conversation, id, item) VALUES (?,?,?)", rows)
