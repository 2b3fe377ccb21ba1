"""A SQLite file that several gateways open."""

import sqlite3
import threading
from pathlib import Path

from gateway.storage.sqlite import Database


def test_two_that_open_a_new_file_at_once_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite"
    first = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    first.execute("BEGIN IMMEDIATE")
    first.execute("CREATE TABLE a (x)")
    commits = threading.Timer(0.2, lambda: first.execute("COMMIT"))
    commits.start()
    second = Database(path, "CREATE TABLE IF NOT EXISTS b (x);")
    second.close()
    commits.join()
    assert {name for (name,) in first.execute("SELECT name FROM sqlite_master")} == {"a", "b"}
    first.close()
