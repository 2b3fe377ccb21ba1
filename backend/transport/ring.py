"""A ring in shared memory for features, between processes of one host.  Writer: a verifier's worker; reader: a drafter.

A Unix socket moves a large message in pieces of its small buffer, with a thread switch for each.  Here the data is copied in
once and out once, and the message on the socket holds only its position.

    the segment   [ token, 16 bytes | tail, 8 bytes | ... to HEADER | `capacity` bytes of data ]

Positions count bytes since the start and never decrease.  The writer owns the head, the reader the tail (in the segment).
Everything between them is unread.  If there is no room, `write` returns None and the sender uses its socket; nothing waits.

The segment is a memfd: it has no name, vanishes with the last process that maps it, however that ends, and cannot shrink under
its reader (sealed).  The reader opens it through the writer's `/proc/PID/fd`, which works for the same user in the same PID
namespace, and checks the token.  If that fails, the sockets are used.
"""

import fcntl
import mmap
import os
import secrets

import msgspec

HEADER = 64
TOKEN_BYTES = 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RingRef(msgspec.Struct, frozen=True, array_like=True):
    """Where another process of the same host finds a segment of shared memory."""

    pid: int
    fd: int
    token: bytes
    capacity: int


class RingWriter:
    """Makes a segment for `capacity` bytes of data; memory is used only as it is written to.  Raises `OSError`."""

    def __init__(self, capacity: int) -> None:
        self._fd = os.memfd_create("outrider-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, HEADER + capacity)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._fd, HEADER + capacity)
        except OSError:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        self._map[:TOKEN_BYTES] = token
        self._head = self._floor = 0
        self.ref = RingRef(os.getpid(), self._fd, token, capacity)

    def write(self, *parts: bytes | memoryview) -> int | None:
        """Copies data into the ring, its parts one after the other; returns its position, or None if there is no room now."""
        size, capacity, at = sum(map(len, parts)), self.ref.capacity, self._head
        tail = max(_get_tail(self._map), self._floor)
        if tail >= at:
            # Everything was read: start at the front again, whose memory is still in the processor's cache.
            at = tail = self._floor = -(-at // capacity) * capacity
        elif at % capacity + size > capacity:
            at += capacity - at % capacity
        if size > capacity or at + size - tail > capacity:
            return None
        first = HEADER + at % capacity
        for part in parts:
            self._map[first : first + len(part)] = part
            first += len(part)
        self._head = at + size
        return at

    def close(self) -> None:
        """Unmaps and closes the segment; a reader's mapping stays valid."""
        self._map.close()
        os.close(self._fd)


class RingReader:
    """Maps a segment.  Raises `OSError` or `ValueError` if it is missing or is not what `RingWriter` makes."""

    def __init__(self, ref: RingRef) -> None:
        if not (ref.capacity > 0 and ref.pid > 0 and ref.fd >= 0 and len(ref.token) == TOKEN_BYTES):
            raise ValueError("no description of a ring")
        path = f"/proc/{ref.pid}/fd/{ref.fd}"
        if not os.readlink(path).startswith("/memfd:outrider-ring"):
            raise ValueError("not a ring")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != HEADER + ref.capacity or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ValueError("another segment")
            self._map = mmap.mmap(fd, HEADER + ref.capacity)
        finally:
            os.close(fd)
        self._capacity = ref.capacity
        if self._map[:TOKEN_BYTES] != ref.token:
            self.close()
            raise ValueError("another segment")

    def read(self, position: int, size: int) -> bytearray:
        """Copies `size` bytes at `position`.  These and all earlier bytes may then be overwritten.  Raises `ValueError`."""
        at = position % self._capacity
        if position < 0 or size < 0 or at + size > self._capacity or position + size >= 1 << 63:
            raise ValueError("a position outside the ring")
        # No plain slice of the map: converting it to a bytearray would copy the data twice.
        with memoryview(self._map) as whole, whole[HEADER + at : HEADER + at + size] as part:
            data = bytearray(part)
        if position + size > _get_tail(self._map):
            self._map[TOKEN_BYTES : TOKEN_BYTES + 8] = (position + size).to_bytes(8, "little")
        return data

    def close(self) -> None:
        self._map.close()


def _get_tail(segment: mmap.mmap) -> int:
    """Reads the tail: eight aligned bytes, which both sides copy atomically."""
    return int.from_bytes(segment[TOKEN_BYTES : TOKEN_BYTES + 8], "little")
