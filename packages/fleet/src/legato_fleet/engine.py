"""Replicas as one engine, for a front door's server."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from legato.checkpoint.defaults import ModelDefaults, within_vocabulary
from legato.core.cache_config import TransferConfig
from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.request import AddRequest
from legato.core.stats import EngineStats, KeptPromise, ReplicaStats
from legato.core.step_record import EngineRecord, RequestArrived, RequestSent
from legato.core.vocabulary import Vocabulary
from legato.engine.client.deliveries import Deliveries
from legato.engine.client.kv_tickets import Tickets
from legato.engine.client.settings import RunningSettings
from legato.engine.client.submissions import Submission, Submissions, Take
from legato.engine.errors import EngineDeadError
from legato.engine.process.engine_messages import (
    ForgetCache,
    SetAnnouncing,
    SetRecording,
    SetVocabulary,
)
from legato.observe.traces.feed import Activity, sent
from legato.transfer.keys import read_key
from legato_fleet.dispatcher import Asked, Dispatcher
from legato_fleet.link import Link
from legato_fleet.placements import client_request_id
from legato_fleet.records import lost, on_our_clock, output_on_our_clock, renamed
from legato_fleet.replica_messages import (
    Begun,
    Brought,
    ChangeSettings,
    Joined,
    Lost,
    Missed,
    Tells,
    ToReplica,
)
from legato_fleet.replicas import Replicas
from legato_fleet.routing.replica_view import STATE_EVERY_S
from legato_fleet.routing.router import Router
from legato_fleet.totals import FleetTotals

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0
_PAUSE_S = 0.5
"""Before trying again to join a replica, and between checks whether one is idle."""


class FleetEngine:
    """An `Engine` of many replicas: the router chooses one for each request.

    If a replica dies, requests without any output yet are sent to another, once; all others end
    with an error. A request that one refuses is offered to others before it is refused. If prefill
    and decode are separate, a request has two halves, and losing a replica that only prefilled
    loses no request: the decoding replica computes the prompt.

    Args:
        pools: replicas by role.
        first: the replica that came first; all others must serve the same model.
        routing: a key of `ROUTING_POLICIES`.
        is_only_door: whether no other front door uses the replicas, so that this one may change
            their settings.

    Attributes:
        num_restarts: lost replicas, and lost engines of replicas.
        num_stuck, problem: always empty: replicas watch their own processes.
        tickets: has no address: clients do not choose replicas.
        pids: empty: the replicas' processes may be on other machines.
    """

    def __init__(
        self,
        config: EngineConfig,
        pools: Sequence[Replicas],
        first: Link,
        vocabulary: Vocabulary,
        defaults: ModelDefaults,
        *,
        served_model_names: Sequence[str] = (),
        routing: str,
        is_only_door: bool,
    ) -> None:
        info = self.info = first.info.renamed(served_model_names)
        self.vocabulary = vocabulary
        self.defaults = within_vocabulary(defaults, vocabulary.num_ids, info.vocab_size)
        self.tickets = Tickets(TransferConfig(), None)
        self.num_restarts = 0
        self.num_stuck = 0
        self.problem = ""
        self.pids: dict[str, int] = {}
        self.settings = RunningSettings(config.scheduler, info)
        self.settings.watch(lambda now: self._tell_all(ChangeSettings(now.asked)))
        self.settings.watch(lambda now: self._deliveries.promise(now.asked.classes))
        self.activity = Activity(
            lambda is_on: self._tell_all(SetRecording(is_on)),
            lambda is_on: self._tell_all(SetAnnouncing(is_on)),
        )
        self._deliveries = Deliveries(config.scheduler.classes, lambda _: None)
        self._pools = pools
        self._router = Router(routing, config.scheduler.tenant_weights)
        self._is_only_door = is_only_door
        self._links: dict[str, Link] = {}  # key: replica id
        self._totals = FleetTotals()
        self._dispatcher = Dispatcher(
            self._router,
            Asked(
                request=lambda request_id: self._submissions.get(request_id),
                slo=lambda name: self.settings.asked.classes[name],
            ),
            block_size=info.cache.block_size,
            key=read_key(config.transfer),
            totals=self._totals,
        )
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submissions = Submissions(
            check_running=self.check_running, send=self._send, abort=self._dispatcher.abort
        )
        self._begin(self._follow(first))
        self._begin(self._keep_rescuing())
        for replicas in pools:
            self._begin(self._keep_joining(replicas, first.line.door_id))

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        pools: Sequence[Replicas],
        text: Awaitable[tuple[Vocabulary, ModelDefaults]],
        *,
        served_model_names: Sequence[str] = (),
        routing: str,
        is_only_door: bool,
    ) -> "FleetEngine":
        """Wait for a replica of the first pool, and make the engine.

        Args:
            text: as of `EngineClient.start`.
            served_model_names: as of `EngineInfo.renamed`.

        Raises:
            ConfigError: there is no such policy, or the key that replicas share cannot be read.
            Exception: what `Replicas.attach` and awaiting `text` raise.
        """
        first = await Link.open(pools[0], uuid.uuid4().hex)
        try:
            vocabulary, defaults = await text
            return cls(
                config,
                pools,
                first,
                vocabulary,
                defaults,
                served_model_names=served_model_names,
                routing=routing,
                is_only_door=is_only_door,
            )
        except BaseException:
            await first.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether there are replicas, or may be again."""
        return not self.death

    @property
    def death(self) -> str:
        """Why there will be no replicas; empty if there may be."""
        if self._is_closed:
            return "it was stopped"
        deaths = [replicas.death for replicas in self._pools]
        return deaths[0] if all(deaths) else ""

    @property
    def stats(self) -> EngineStats:
        """Counters of all replicas together."""
        return self._totals.of([link.stats for link in self._links.values()])

    @property
    def replicas(self) -> Mapping[str, ReplicaStats]:
        """The counters of each replica; key its id."""
        return {replica_id: link.replica_stats for replica_id, link in self._links.items()}

    @property
    def num_unfinished(self) -> int:
        return len(self._submissions)

    @property
    def unfinished(self) -> list[RequestSent]:
        """Requests that have come and not ended, in the order in which they came."""
        return [sent(one.request) for one in self._submissions]

    def kept(self) -> dict[str, KeptPromise]:
        """Return the promises on gaps between tokens and what was delivered; key the class."""
        return self._deliveries.kept()

    def check_running(self) -> None:
        """Raises `EngineDeadError` if no replica takes requests at the moment."""
        if self.death:
            raise EngineDeadError(f"the fleet is gone: {self.death}")
        if not self._router.is_accepting(time.monotonic()):
            raise EngineDeadError("no replica is ready", retry_after_s=_RETRY_AFTER_S)

    def forget_cache(self) -> None:
        """See `Engine.forget_cache`; all replicas do."""
        self.check_running()
        self._tell_all(ForgetCache())

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """See `Engine.reconfigure`; applies to all replicas, including later ones.

        Also raises `ConfigError` if there may be other front doors.
        """
        if not self._is_only_door:
            raise ConfigError(
                "the settings of replicas behind several front doors are those that they were "
                "started with; deploy them again with others, and they are replaced one after the "
                "other"
            )
        resolved = self.settings.resolve(scheduler)
        self.check_running()
        self.settings.change(scheduler, resolved)

    def submitted(
        self, requests: Iterable[AddRequest], take: Take
    ) -> AbstractAsyncContextManager[Submission]:
        """See `Engine.submitted`."""
        return self._submissions.submitted(requests, take)

    async def close(self, *, at_once: bool = False) -> None:  # noqa: ARG002
        """Leave all replicas; unfinished requests are lost."""
        self._is_closed = True
        for one in self._submissions:
            self._submissions.fail(one, EngineDeadError(f"the fleet is gone: {self.death}"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replicas in self._pools:
            await replicas.close()

    def _tell_all(self, message: ToReplica) -> None:
        for link in self._links.values():
            link.put(message)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_joining(self, replicas: Replicas, door_id: str) -> None:
        """Join each new replica of a pool."""
        while True:
            try:
                link = await Link.open(replicas, door_id)
            except Exception as error:
                logger.warning("cannot be joined to a replica: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if _is_like(link, self.info.model, self.info.max_model_len, self.info.vocab_size):
                self._begin(self._follow(link))
            else:
                logger.error("replica %s serves another model, and gets nothing", link.replica_id)
                self._begin(self._hold(link))

    async def _keep_rescuing(self) -> None:
        """Rerun requests that wait at replicas that hang."""
        while True:
            await asyncio.sleep(STATE_EVERY_S)
            if num_rerun := self._dispatcher.rescue():
                told = "%d requests wait at replicas that tell nothing, and are run elsewhere"
                logger.warning(told, num_rerun)

    async def _hold(self, link: Link) -> None:
        """Stay joined to an unused replica, so that it is not offered again."""
        with contextlib.suppress(Exception):
            async for _ in link.messages():
                pass

    async def _follow(self, link: Link) -> None:
        """Use a replica until it ends."""
        replica_id = link.replica_id
        logger.info("replica %s is there", replica_id)
        self._links[replica_id] = link
        self._introduce(link)
        if link.state is not None:
            self._dispatcher.note_state(link, link.state)
        parts = [
            asyncio.create_task(part)
            for part in (self._read(link), link.send_all(), self._drain(link))
        ]
        try:
            [ended, *_], _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if error := ended.exception():
                logger.error("replica %s is lost: %s", replica_id, error)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            await link.close()
            del self._links[replica_id]
            self._totals.note_gone(link.stats)
            self.num_restarts += not link.line.is_to_end.is_set()
            self._leave(link, "the replica ended while it held this request")

    def _introduce(self, link: Link) -> None:
        """Send a new replica the vocabulary and settings that the others have."""
        if self.vocabulary.num_ids:  # a caller may have no tokenizer
            link.put(SetVocabulary(self.vocabulary))
        if self._is_only_door:
            link.put(ChangeSettings(self.settings.asked))
        if self.activity.records.is_wanted:
            link.put(SetRecording(True))
        if self.activity.live.is_wanted:
            link.put(SetAnnouncing(True))

    async def _read(self, link: Link) -> None:
        async for message in link.messages():
            match message:
                case Brought():
                    self._take(link, message)
                case Begun(step=step, sent_s=sent_s):
                    behind_s = link.clock.note(sent_s, time.monotonic())
                    self.activity.note_begun(
                        renamed(on_our_clock(step, behind_s), client_request_id)
                    )
                case Tells(state=state, transfer=transfer):
                    link.state, link.transfer = state, transfer
                    self._dispatcher.note_state(link, state)
                case Lost():
                    self.num_restarts += 1
                    self._totals.note_gone(link.stats)
                    link.stats, link.state = EngineStats(), None
                    self._leave(link, "the engine process died while it held this request")
                case Missed(request_id=sent_id):
                    self._dispatcher.note_missed(link, sent_id)
                case Joined():
                    raise AssertionError("a replica joins once")

    async def _drain(self, link: Link) -> None:
        """Before a replica ends, let it finish its requests."""
        await link.line.is_to_end.wait()
        logger.info("replica %s is about to end", link.replica_id)
        self._dispatcher.drain(link)
        while self._dispatcher.placed.is_used(link):
            await asyncio.sleep(_PAUSE_S)

    def _take(self, link: Link, brought: Brought) -> None:
        now_s = time.monotonic()
        behind_s = link.clock.note(brought.sent_s, now_s)
        link.stats = brought.stats
        self._router.note_kv_events(link.replica_id, brought.kv_events)
        self.activity.note([self._seen(link, one, behind_s) for one in brought.records], now_s)
        told = (self._dispatcher.told(link, output) for output in brought.outputs)
        outputs = [output_on_our_clock(one, behind_s) for one in told if one is not None]
        given = self._submissions.take(outputs, now_s)
        self._submissions.note(given, lambda stream: self._deliveries.note(stream, now_s))

    def _seen(self, link: Link, record: EngineRecord, behind_s: float) -> EngineRecord:
        """Convert a record to our clock and ids; of our own requests, the arrival is known."""
        record = on_our_clock(record, behind_s)
        if isinstance(record, RequestArrived):
            half = self._dispatcher.placed.half(link, record.request_id)
            one = None if half is None else self._submissions.get(half.request_id)
            if one is not None:
                record = msgspec.structs.replace(record, arrived_s=one.request.sent_s)
        return renamed(record, client_request_id)

    def _send(self, request: AddRequest) -> None:
        self._dispatcher.send(request)
        self.activity.note_sent(request)

    def _leave(self, link: Link, why: str) -> None:
        """End those requests of a lost engine that cannot be rerun elsewhere."""
        left = self._dispatcher.leave(link)
        for one, placed in left.ended:
            request_id = one.request.request_id
            self.activity.records.publish([lost(request_id, placed.num_tokens, why)])
            self._submissions.fail(one, EngineDeadError(why, retry_after_s=1.0))
        if left.ended or left.num_rerun:
            logger.warning(
                "replica %s had %d requests: %d are run elsewhere, and %d end",
                link.replica_id,
                len(left.ended) + left.num_rerun,
                left.num_rerun,
                len(left.ended),
            )


def _is_like(link: Link, model: str, max_model_len: int, vocab_size: int) -> bool:
    info = link.info
    return (info.model, info.max_model_len, info.vocab_size) == (model, max_model_len, vocab_size)
