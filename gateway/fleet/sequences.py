"""This gateway's sequences in flight.  Pure data; event loop."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from backend.engine.front import EngineCoreRequest
from backend.routing.choosing import RoutingRequest
from backend.wire.engine import SHARED_SUFFIX, Account, EmittedText
from gateway.admission.claim import Claim
from gateway.auth.caller import Priority
from gateway.fleet.engine_link import VerifierLink
from gateway.fleet.statistics import Cut, SequenceStatistics


@dataclass
class InFlight:
    """One sequence, with all that is needed to continue it at another verifier, and to time it."""

    request: EngineCoreRequest
    link: VerifierLink | None
    """The verifier where it runs; None while it waits for one, after a loss or while `held`."""
    arrived: float
    """Monotonic seconds, as are `first_token` and `last_token`."""
    first_token: float | None = None
    last_token: float | None = None
    emitted: list[int] = field(default_factory=list)
    emitted_tokens: int = 0
    """Tokens of these in its answer: none after a stop string."""
    places: int = 0
    """How often it was given to a verifier so far."""
    placed_at: float = 0.0
    """When it was given to its present verifier; monotonic seconds."""
    taken: bool = False
    """Whether its present verifier's engine is known to have it."""
    lost: set[str] = field(default_factory=set)
    """Incarnations of verifiers that were lost while this sequence was in their engine, and have not come back."""
    context: int = 0
    """Context length of the first verifier, in tokens."""
    statistics: SequenceStatistics | None = None
    """Speculation statistics, if its client asks for them."""
    claim: Claim = field(default_factory=Claim)
    """The claim of the request it belongs to."""
    held: bool = False
    """It is a batch's, gives way to other requests, and goes on when there is room."""
    cut: Cut | None = None
    giving_up: asyncio.TimerHandle | None = None
    """Fails the sequence if it waits too long for a verifier."""

    @property
    def batched(self) -> bool:
        """Whether it belongs to a batch, and so gives way to others."""
        return self.claim.priority is Priority.BATCH

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_token_ids or ()) + len(self.emitted)

    @property
    def output(self) -> EmittedText:
        """Its tokens, as verifiers take them for look-ups."""
        request = self.request
        before = list((request.prompt_token_ids or ())[-SHARED_SUFFIX:])
        return EmittedText(self.claim.options.salted(request.cache_salt).tenant, before, self.emitted)

    @property
    def ask(self) -> RoutingRequest:
        """What routing may know about the sequence."""
        request = self.request
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        scope = f"{len(adapter)}/{adapter}/{request.cache_salt or ''}"
        # Of one key: others may name their sessions alike.
        session = f"{self.claim.caller.owner}/{self.claim.session}" if self.claim.session else None
        return RoutingRequest(request.prompt_token_ids or (), scope, session)

    @property
    def place_id(self) -> str:
        """Its id at its present verifier: another at each verifier, so that late outputs of an earlier one are recognised."""
        return self.request.request_id if self.places <= 1 else f"{self.request.request_id}~{self.places}"

    def fits(self, link: VerifierLink) -> bool:
        """Whether this verifier's context length would end it where the first verifier's would."""
        params = self.request.sampling_params
        longest = len(self.request.prompt_token_ids or ()) + (params.max_tokens or 0 if params is not None else 0)
        return link.welcome is not None and min(longest, self.context) <= link.welcome.max_model_len

    def blame(self, cause: str) -> None:
        """Notes that it may be why its verifier has died, or has given up on it (`cause`)."""
        # A sequence that had not reached the engine did not cause the loss: verifiers also die together.
        if self.taken and self.link is not None:
            incarnation = self.link.member.incarnation
            # A verifier that has given up on a sequence is not lost, so each such event counts by itself.
            self.lost.add(f"{incarnation}~{self.places}" if cause == "given_up" else incarnation)


class Sequences:
    """Every sequence in flight, by its request id and, while it runs at a verifier, by its `place_id`.

    Counters answer what each new sequence asks, because a search among thousands would be slow.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, InFlight] = {}
        self._by_place: dict[str, InFlight] = {}
        self._batches: dict[str, InFlight] = {}
        self._placed: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(list(self._by_id.values()))

    def __contains__(self, record: InFlight) -> bool:
        return self._by_id.get(record.request.request_id) is record

    def get(self, request_id: str) -> InFlight | None:
        return self._by_id.get(request_id)

    def running_as(self, place_id: str) -> InFlight | None:
        """The sequence with this id at its present verifier."""
        return self._by_place.get(place_id)

    def at(self, link: VerifierLink | None) -> list[InFlight]:
        """Those that run at this verifier."""
        return [record for record in self._by_place.values() if record.link is link]

    def waiting(self) -> list[InFlight]:
        """Those that have lost their verifier and wait for another."""
        return [record for record in self._by_id.values() if record.link is None and not record.held]

    @property
    def batches(self) -> Collection[InFlight]:
        """A view of batches' sequences, earliest first."""
        return self._batches.values()

    @property
    def batched(self) -> int:
        """Sequences of batches at verifiers."""
        return sum(record.link is not None for record in self.batches)

    @property
    def held(self) -> int:
        """Sequences of batches that have given way to others."""
        return sum(record.held for record in self.batches)

    def placed(self, verifier_id: str) -> int:
        """How many sequences run at this verifier."""
        return self._placed[verifier_id]

    def load(self, verifier_id: str) -> tuple[int, int]:
        """Numbers of tokens and sequences at this verifier."""
        return self._tokens[verifier_id], self._placed[verifier_id]

    def put(self, record: InFlight, link: VerifierLink) -> None:
        """Places a sequence at `link`, under its `place_id`."""
        record.link = link
        self._placed[link.member.id] += 1
        self._tokens[link.member.id] += record.tokens
        request_id = record.request.request_id
        self._by_id[request_id] = self._by_place[record.place_id] = record
        if record.batched:
            self._batches[request_id] = record

    def grown(self, record: InFlight, tokens: Sequence[int], now: float) -> None:
        record.first_token = record.first_token or now
        record.last_token = now
        record.emitted.extend(tokens)
        if record.link is not None:
            self._tokens[record.link.member.id] += len(tokens)

    def cut(self, record: InFlight, cut: Cut | None) -> None:
        """Takes a sequence from its verifier."""
        self._displace(record)
        record.link, record.cut = None, cut

    def remove(self, record: InFlight) -> None:
        request_id = record.request.request_id
        self._by_id.pop(request_id, None)
        self._batches.pop(request_id, None)
        self._displace(record)
        if record.giving_up is not None:
            record.giving_up.cancel()

    def _displace(self, record: InFlight) -> None:
        if self._by_place.pop(record.place_id, None) is not None and record.link is not None:
            self._placed[record.link.member.id] -= 1
            self._tokens[record.link.member.id] -= record.tokens


class AwaitedAccounts:
    """Accounts that have not come yet, by the sequence's id at its verifier.  Aborted sequences get one, too."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[VerifierLink, SequenceStatistics, asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def placed(self, record: InFlight, link: VerifierLink) -> None:
        """Expects an account, if the sequence asks for one."""
        if (statistics := record.statistics) is None:
            return
        if record.cut is not None:
            statistics.moves.append(record.cut)
        statistics.awaited.append(asyncio.get_running_loop().create_future())
        self._places[record.place_id] = link, statistics, statistics.awaited[-1]

    def came(self, accounts: Sequence[Account]) -> None:
        for account in accounts:
            if account.request_id in self._places:
                self._places[account.request_id][1].accounts.append(account)
                self.ended(account.request_id)

    def ended(self, place_id: str) -> None:
        """Expects no account for a sequence that has ended: it would have come first, if the verifier had the request."""
        if place_id in self._places:
            self._places.pop(place_id)[2].set_result(None)

    def lost(self, link: VerifierLink) -> None:
        """Expects no more accounts from this verifier."""
        for place_id in [place_id for place_id, (at, _, _) in self._places.items() if at is link]:
            self.ended(place_id)
