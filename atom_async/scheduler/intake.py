"""Where a request stands while it holds nothing: ready, parked behind a producer, or blocked by memory.

A request is placed when it arrives, and again when something it depended on changed: its wait ended, it was
preempted, the block it needs is computed by somebody. In between it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from heapq import heapify, heappop, heappush
from operator import attrgetter

from atom_async.cache.pool import BlockPool
from atom_async.events.schema import (
    Event,
    PrefixReady,
    ReleaseOutcome,
    RequestBlocked,
    RequestParked,
    RequestReleased,
    RequestReserved,
)

from .cost_model import CostModel
from .counters import Counters
from .limits import Limits
from .policy import Policy, Prefill
from .prefixes import common_blocks, find_blocks
from .queues import BlockedQueue, OrderedQueue
from .request import Order, Request, State
from .waits import Boundaries, Wait, Waiters

_rank = attrgetter("rank")

LEAST_WAIT_S = 30.0
WAIT_FACTOR = 10.0
"""Where `--prefix-wait-ms` is not set, a wait may end after this multiple of the producer's predicted time to the
boundary, and not before LEAST_WAIT_S; it goes on for as long as the producer is queued or has come further since the
last look. Broken promises are told at once; this guards against a producer that does not get on."""


MOST_ALARMS = 64
"""Beyond so many, and then beyond twice those that still mean something, the alarms of ended requests are dropped."""


class Alarm(Enum):
    """What a time means for a queued request."""

    WAIT = "wait"
    """It has been parked for long enough."""
    BYPASS = "bypass"
    """It was passed for long enough."""
    EXPIRE = "expire"
    """Its own deadline."""


class Intake:
    """Owns every queued request."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        limits: Limits,
        policy: Policy,
        costs: CostModel,
        boundaries: Boundaries,
        counters: Counters,
        emit: Callable[[Event], None],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._policy = policy
        self._costs = costs
        self.boundaries = boundaries
        self._counters = counters
        self._emit = emit
        self.ready = OrderedQueue()
        """In order; a walk may admit them."""
        self.instant = OrderedQueue()
        """Likewise, with at most one token to compute."""
        self.blocked = BlockedQueue()
        self.reserved = OrderedQueue()
        """Blocked, and no longer to be passed."""
        self.parked = 0
        self.queued_tokens = 0
        """Uncached tokens of all who are queued."""
        self.producers: dict[bytes, Request] = {}
        """Next block to compute -> the ready or running request that will."""
        self._unplaced: list[Request] = []
        self._alarms: list[tuple[float, int, Alarm, Request]] = []
        self._alarm_count = 0
        self._most_alarms = MOST_ALARMS

    # Placing -------------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> None:
        """A new request, or one that was preempted."""
        request.queued_at = now
        if request.deadline is not None and not request.group.started:
            self._set_alarm(request.deadline, Alarm.EXPIRE, request)
        self._unplaced.append(request)

    def present_tokens(self, request: Request) -> int:
        """Tokens that the request would not compute if it ran now."""
        return self._look_up(request)[0]

    def settle(self, now: float) -> None:
        """Places whoever has no place, in rank order: the first of equals leads, the others wait for it."""
        while self._unplaced:
            unplaced, self._unplaced = sorted(self._unplaced, key=_rank), []
            for request in unplaced:
                if request.state is State.READY and request.home is None:
                    self._place(request, now)

    def _place(self, request: Request, now: float) -> None:
        present, next_hash = self._look_up(request)
        if next_hash is not None and self._parks(request, next_hash, present, now):
            return
        self._stand_in(request, present)
        if next_hash is not None:
            self._lead(request, next_hash, now)

    def _stand_in(self, request: Request, present: int) -> None:
        self._count(request, request.total - min(present, request.total - 1))
        request.order = self._order(request, present)
        request.home = self.instant if request.uncached <= 1 else self.ready
        request.home.add(request)

    def _look_up(self, request: Request) -> tuple[int, bytes | None]:
        """Tokens that it can reuse, and the hash of its first block that nobody has submitted."""
        if not self._limits.prefix_caching:
            return 0, None
        block_size = self._limits.block_size
        if not request.reuses_prefix:  # it computes all of it again, so nobody should wait for it to come so far
            return 0, None
        found = len(find_blocks(self._pool, request))
        present = self.boundaries.reusable(request, found * block_size)
        return present, request.chain[found] if found < len(request.chain) else None

    def _order(self, request: Request, present: int) -> Order:
        uncached = request.total - min(present, request.total - 1)
        key = self._policy.order(Prefill(request.arrived_at, uncached, present))
        return (request.priority, key, request.arrival_rank)

    def _count(self, request: Request, uncached: int) -> None:
        self.queued_tokens += uncached - request.uncached
        request.uncached = uncached

    # Waiting for a prefix ------------------------------------------------------------------------

    def _parks(self, request: Request, next_hash: bytes, present: int, now: float) -> bool:
        producer = self.producers.get(next_hash)
        if producer is None or producer is request or not request.reuses_prefix:
            return False
        boundary, why_not = self._weigh(request, producer, present)
        if why_not:
            self._counters.declined_waits[why_not] += 1
            request.computes_despite = producer
            return False
        self._park(request, producer, boundary, present, now)
        return True

    def _weigh(self, request: Request, producer: Request, present: int) -> tuple[int, str]:
        """The boundary to wait for, or why waiting does not pay."""
        block_size = self._limits.block_size
        if request.waits_over:
            return 0, "deadline"
        if producer.priority > request.priority:
            return 0, "priority"
        reached = producer.computed if producer.state is State.RUNNING else present
        common = common_blocks(request.chain, producer.chain, present // block_size) * block_size
        boundary = self.boundaries.promised(producer, common, reached)
        if boundary is None:
            return 0, "checkpoint_declined"
        if boundary <= present:
            return 0, "no_gain"
        wait_ms = self._costs.chunk_ms(reached, max(boundary - reached, 0))
        if wait_ms > self._costs.chunk_ms(present, boundary - present):
            return 0, "cost"
        return boundary, ""

    def _park(self, request: Request, producer: Request, boundary: int, present: int, now: float) -> None:
        urgency = self._order(request, present)
        request.order = self._order(request, boundary)
        self._count(request, request.total - min(boundary, request.total - 1))
        if request.wait_deadline is None:
            request.wait_deadline = now + self._longest_wait_s(producer, boundary, present)
        request.wait = Wait(producer, boundary, now, boundary - present, producer.computed, urgency)
        self.release_waiters(request, "producer_waits", now)
        request.become(State.PARKED)
        self.parked += 1
        if producer.waiters is None:
            producer.waiters = Waiters()
        producer.waiters.add(request)
        self._hurry(producer, urgency)
        self._set_alarm(request.wait_deadline, Alarm.WAIT, request)
        self._counters.parked += 1
        self._emit(
            RequestParked(
                request_id=request.request_id,
                producer_id=producer.request_id,
                boundary_tokens=boundary,
                saved_tokens=boundary - present,
                deadline=request.wait_deadline,
            )
        )

    def _longest_wait_s(self, producer: Request, boundary: int, present: int) -> float:
        if self._limits.prefix_wait_s is not None:
            return self._limits.prefix_wait_s
        predicted_ms = self._costs.chunk_ms(present, boundary - present)
        return max(LEAST_WAIT_S, WAIT_FACTOR * predicted_ms / 1e3)

    def _hurry(self, producer: Request, urgency: Order) -> None:
        """A queued producer moves up to where its waiter would stand: waiting is never worse than computing."""
        if producer.home is not None and urgency < producer.order:
            producer.home.remove(producer)
            producer.order = (urgency[0], urgency[1], producer.arrival_rank)
            producer.home.add(producer)

    def _lead(self, request: Request, next_hash: bytes, now: float) -> None:
        """From now on whoever needs this block finds `request`, unless one of higher priority computes it."""
        current = self.producers.get(next_hash)
        if current is not None and current is not request:
            if current.priority <= request.priority:
                return
            current.leads = None
            if current.home is not None:  # not begun: it can wait for the new one
                self.unplace(current)
                self.release_waiters(current, "priority", now)
        self.producers[next_hash] = request
        request.leads = next_hash

    def _unlead(self, request: Request) -> None:
        if request.leads is not None:
            del self.producers[request.leads]
            request.leads = None

    def advanced(self, producer: Request, start: int, end: int, now: float) -> None:
        """A chunk [start, end) of a running request was submitted."""
        block_size = self._limits.block_size
        self._unlead(producer)
        first, behind = start // block_size, end // block_size
        if behind > first and self.blocked:
            for request in list(self.blocked.by_hash.get(producer.chain[first], {}).values()):
                self.unplace(request)
        if not producer.decoding and behind < len(producer.chain):
            self._lead(producer, producer.chain[behind], now)
        if self.boundaries.pending_reusable:
            self.reach(producer, end, now)
        if producer.decoding and self.boundaries.pending_reusable:
            assert not producer.waiters, f"{producer.request_id} ended its prompt with waiters left"

    def reach(self, producer: Request, tokens: int, now: float) -> None:
        """The producer's prefix can be reused up to `tokens`."""
        if not producer.waiters:
            return
        for boundary in producer.waiters.reached(tokens):
            members = producer.waiters.take(boundary)
            ready = PrefixReady(producer_id=producer.request_id, boundary_tokens=boundary, released=len(members))
            self._emit(ready)
            for request in members:
                self._released(request, "prefix_ready", now, boundary)

    def release_waiters(self, producer: Request, outcome: ReleaseOutcome, now: float) -> None:
        """The promise does not hold."""
        if producer.waiters:
            waiters, producer.waiters = producer.waiters.all(), None
            for request in waiters:
                self._released(request, outcome, now, 0)

    def release(self, request: Request, outcome: ReleaseOutcome, now: float) -> None:
        """One waiter is let go."""
        assert request.wait is not None
        assert request.wait.producer.waiters is not None
        request.wait.producer.waiters.remove(request)
        self._released(request, outcome, now, 0)

    def _released(self, request: Request, outcome: ReleaseOutcome, now: float, reused: int) -> None:
        wait = request.wait
        assert wait is not None
        request.wait = None
        request.become(State.READY)
        self.parked -= 1
        self._counters.releases[outcome] += 1
        self._emit(
            RequestReleased(
                request_id=request.request_id,
                outcome=outcome,
                waited_ms=(now - wait.since) * 1e3,
                reused_tokens=reused,
            )
        )
        self._unplaced.append(request)

    # Waiting for memory --------------------------------------------------------------------------

    def block(self, request: Request, needed: int, next_hash: bytes | None, now: float) -> bool:
        """It does not fit. Returns whether that is news."""
        news = request.state is State.READY
        if news:
            self._leave_home(request)
            self._unlead(request)
            request.become(State.BLOCKED)
        elif needed == request.needed_blocks:
            return False
        else:
            self.blocked.remove(request)
        request.needed_blocks = needed
        request.needs = next_hash
        self.blocked.add(request)
        if request.blocked_since < 0:
            request.blocked_since = now
        reserved_at = request.blocked_since + self._limits.max_bypass_s
        if news:
            self._counters.blocked += 1
            self._set_alarm(reserved_at, Alarm.BYPASS, request)
            self._emit(
                RequestBlocked(
                    request_id=request.request_id,
                    needed_blocks=needed,
                    available_blocks=self._pool.available,
                    reserved_at=reserved_at,
                )
            )
            self._let_smaller_go(request, now)
        return news

    def _let_smaller_go(self, blocked: Request, now: float) -> None:
        """Its waiters that need less memory need not share its fate."""
        for request in blocked.waiters.all() if blocked.waiters else ():
            assert request.wait is not None
            present = request.wait.boundary - request.wait.saved
            if -(-(request.total - present) // self._limits.block_size) < blocked.needed_blocks:
                self.release(request, "producer_waits", now)

    def _reserve(self, request: Request, now: float) -> None:
        self.blocked.remove(request)
        request.reserved = True
        request.home = self.reserved
        self.reserved.add(request)
        self._counters.reserved += 1
        self._emit(
            RequestReserved(
                request_id=request.request_id,
                needed_blocks=request.needed_blocks,
                blocked_ms=(now - request.blocked_since) * 1e3,
            )
        )

    # Leaving a place -----------------------------------------------------------------------------

    def unplace(self, request: Request) -> None:
        """What it depended on has changed: it will be placed anew."""
        self._leave_home(request)
        self._unlead(request)
        if request.state is State.BLOCKED:
            request.become(State.READY)
        self._unplaced.append(request)

    def enter(self, request: Request) -> None:
        """It is admitted; what it leads, it leads on."""
        self._leave_home(request)
        if request.state is State.BLOCKED:
            request.become(State.READY)
        request.blocked_since = -1.0
        self._count(request, 0)

    def end(self, request: Request, outcome: ReleaseOutcome, now: float) -> None:
        """It leaves for good, queued or running: nobody waits for it any more."""
        if request.home is not None:
            self._leave_home(request)
        elif request.wait is not None:
            assert request.wait.producer.waiters is not None
            request.wait.producer.waiters.remove(request)
            request.wait = None
            self.parked -= 1
        elif request.state is State.BLOCKED:
            self._leave_home(request)
        if request.leads is not None:
            self._unlead(request)
        self.queued_tokens -= request.uncached
        request.uncached = 0
        if request.waiters:
            self.release_waiters(request, outcome, now)

    def _leave_home(self, request: Request) -> None:
        if request.home is not None:
            request.home.remove(request)
            request.home = None
            request.reserved = False
        elif request.state is State.BLOCKED:
            self.blocked.remove(request)

    # Time ----------------------------------------------------------------------------------------

    def next_alarm(self) -> float | None:
        """When `expire` has something to do, if nothing else happens."""
        alarms = self._alarms
        while alarms:
            when, _, kind, request = alarms[0]
            if self._still_due(kind, request, when):
                return when
            heappop(alarms)
        return None

    def expire(self, now: float) -> list[Request]:
        """Does what time demands; returns the requests whose deadline has passed in the queue."""
        expired: list[Request] = []
        while (when := self.next_alarm()) is not None and when <= now:
            _, _, kind, request = heappop(self._alarms)
            if kind is Alarm.WAIT:
                self._end_wait(request, now)
            elif kind is Alarm.BYPASS:
                self._reserve(request, now)
            else:
                expired.append(request)
        return expired

    def _end_wait(self, request: Request, now: float) -> None:
        """Where no time was set, one that is only slow is waited for: nobody would get on faster by computing the
        same beside it, and those who wait for it would all end their waits at once."""
        wait = request.wait
        assert wait is not None
        producer = wait.producer
        if self._limits.prefix_wait_s is None and (producer.slot < 0 or producer.computed > wait.seen):
            wait.seen = producer.computed
            request.wait_deadline = now + LEAST_WAIT_S
            self._set_alarm(request.wait_deadline, Alarm.WAIT, request)
        else:
            request.waits_over = True
            self.release(request, "deadline", now)

    def _set_alarm(self, when: float, kind: Alarm, request: Request) -> None:
        self._alarm_count += 1
        heappush(self._alarms, (when, self._alarm_count, kind, request))
        if len(self._alarms) > self._most_alarms:
            self._alarms = [alarm for alarm in self._alarms if self._still_due(alarm[2], alarm[3], alarm[0])]
            heapify(self._alarms)
            self._most_alarms = max(MOST_ALARMS, 2 * len(self._alarms))

    def _still_due(self, kind: Alarm, request: Request, when: float) -> bool:
        if kind is Alarm.WAIT:
            return request.state is State.PARKED and request.wait_deadline == when
        if kind is Alarm.BYPASS:
            passed_for = request.blocked_since + self._limits.max_bypass_s
            return request.state is State.BLOCKED and not request.reserved and passed_for == when
        return request.queued and not request.group.started
