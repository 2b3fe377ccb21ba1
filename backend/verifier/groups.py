"""Micro-batches: which requests are verified together, and whose turn it is.

Pure; scheduler's process and thread.  With one group every drafted request is verified in the same step and the drafter works
between steps.  With two, one group is verified while the other's drafts are made.  Left to themselves, requests whose drafts
happen to be ready fall into lock-step or crumble into batches of one; so groups are formed on purpose and kept level.
"""

from __future__ import annotations

SMALLEST = 2
"""Requests per group below which a second group is not formed: a step costs the verifier nearly the same for one or two."""


class Groups:
    """Members by group, in order of arrival.  Invariant: with two groups their sizes differ by one at most."""

    def __init__(self, wanted: int = 1) -> None:
        self._wanted = wanted
        self._members: list[dict[str, None]] = [{}]
        self._turn = 0

    def want(self, groups: int) -> None:
        """Forms one or two groups from now on."""
        if groups != self._wanted:
            self._wanted = groups
            self._level()

    def add(self, request_id: str) -> None:
        """A request begins to decode; it joins the smaller group."""
        for group in self._members:
            if request_id in group:
                return
        min(self._members, key=len)[request_id] = None
        self._level()

    def remove(self, request_id: str) -> None:
        """The request is finished, aborted or preempted."""
        for group in self._members:
            if request_id in group:
                del group[request_id]
                self._level()
                return

    def present(self) -> dict[str, None]:
        """The group to verify in the next step."""
        return self._members[self._turn]

    def others(self) -> list[str]:
        """Requests whose turn it is not."""
        return [r for i, group in enumerate(self._members) if i != self._turn for r in group]

    def stepped(self) -> None:
        """The present group was verified; the other one is next."""
        self._turn = (self._turn + 1) % len(self._members)

    def __len__(self) -> int:
        """How many groups there are now."""
        return len(self._members)

    def _level(self) -> None:
        total = sum(len(group) for group in self._members)
        if self._wanted == 1 or total < 2 * SMALLEST:
            if len(self._members) > 1:
                self._members = [dict.fromkeys(r for group in self._members for r in group)]
                self._turn = 0
            return
        if len(self._members) == 1:
            ordered = list(self._members[0])
            self._members = [dict.fromkeys(ordered[::2]), dict.fromkeys(ordered[1::2])]
            return
        large, small = sorted(self._members, key=len, reverse=True)
        while len(large) - len(small) > 1:
            newest = next(reversed(large))
            del large[newest]
            small[newest] = None
