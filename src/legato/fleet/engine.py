"""Replicas as one engine: what a front door's server sees of them."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from legato.core.block_hash import block_hashes
from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats, KeptPromise
from legato.core.step_record import RequestSent
from legato.engine.errors import EngineDeadError
from legato.engine.frontend.activity import Activity, sent
from legato.engine.frontend.deliveries import Deliveries
from legato.engine.frontend.submission import Submission, Take
from legato.engine.frontend.submissions import Submissions, Unfinished
from legato.engine.process.messages import KnowVocabulary
from legato.fleet.link import Link
from legato.fleet.messages import Brought, Joined, Lost, Missed, Tells
from legato.fleet.replicas import Replicas
from legato.fleet.totals import summed
from legato.model.defaults import ModelDefaults, within_vocabulary
from legato.model.vocabulary import Vocabulary
from legato.routing.request import RoutedRequest
from legato.routing.router import NoReplicaError, Router

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0
_PAUSE_S = 0.5
"""Before it is tried again to be joined to a replica, and between looks whether one is empty."""
_MOST_HASHED_TOKENS = 2**14
"""Of a prompt, by which it is known where it is cached; each block takes a few microseconds."""


class _Placed(msgspec.Struct):
    """Where a request runs, and how many tokens have come of it."""

    link: Link
    num_tokens: int = 0


class FleetEngine:
    """An `Engine` of many: each request is sent to the replica that the router chooses.

    Where a replica dies, requests of which nothing has come yet are sent to another, once; all
    others end with an error.

    Args:
        first: the replica that came first; all others must be like it.
        routing: a key of `ROUTING_POLICIES`.

    Attributes:
        num_restarts: replicas, and engines of theirs, that were lost.
        activity: of what single steps hold, it tells nothing.
        pids: none of them are this machine's to look at.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: Replicas,
        first: Link,
        vocabulary: Vocabulary,
        defaults: ModelDefaults,
        *,
        served_model_names: Sequence[str] = (),
        routing: str,
    ) -> None:
        info = self.info = first.info.renamed(served_model_names)
        self.vocabulary = vocabulary
        self.num_restarts = 0
        self.pids: dict[str, int] = {}
        self.scheduler_config = config.scheduler
        self.activity = Activity(lambda _: None, lambda _: None)
        resolved = config.scheduler.resolve(info.max_model_len, info.device)
        self.most_batched_tokens = resolved.most_batched_tokens(info.max_model_len, info.device)
        self._deliveries = Deliveries(config.scheduler.classes, lambda _: None)
        self._replicas = replicas
        self._router = Router(routing, config.scheduler.tenant_weights)
        self._links: dict[str, Link] = {}  # key replica id
        self._placed: dict[str, _Placed] = {}  # key request id
        self._unplaced: dict[str, AddRequest] = {}  # likewise; they wait for a replica
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submissions = Submissions(
            info,
            vocabulary,
            within_vocabulary(defaults, vocabulary.num_ids, info.vocab_size),
            check_running=self.check_running,
            send=self._send,
            abort=self._abort,
        )
        self._begin(self._follow(first))
        self._begin(self._keep_joining(first.line.door_id))

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        replicas: Replicas,
        text: Awaitable[tuple[Vocabulary, ModelDefaults]],
        *,
        served_model_names: Sequence[str] = (),
        routing: str,
    ) -> "FleetEngine":
        """Wait until there is a replica.

        Args:
            text: as of `EngineClient.start`.
            served_model_names: as of `EngineInfo.renamed`.

        Raises:
            ConfigError: there is no such policy.
            Exception: what `Replicas.attach` and awaiting `text` raise.
        """
        first = await Link.open(replicas, uuid.uuid4().hex)
        try:
            vocabulary, defaults = await text
            return cls(
                config,
                replicas,
                first,
                vocabulary,
                defaults,
                served_model_names=served_model_names,
                routing=routing,
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
        """Why there will be none, if so."""
        return "it was stopped" if self._is_closed else self._replicas.death

    @property
    def stats(self) -> EngineStats:
        """Of all replicas together."""
        return summed([link.stats for link in self._links.values()])

    @property
    def num_unfinished(self) -> int:
        return len(self._submissions)

    @property
    def unfinished(self) -> list[RequestSent]:
        """Requests that have come and not ended, in the order in which they came."""
        return [sent(one.request) for one in self._submissions]

    def kept(self) -> dict[str, KeptPromise]:
        """What is promised of gaps between tokens, and delivered; key the class."""
        return self._deliveries.kept()

    def check_running(self) -> None:
        """Raises `EngineDeadError` where no replica takes requests just now."""
        if self.death:
            raise EngineDeadError(f"the fleet is gone: {self.death}")
        if not any(view.is_accepting for view in self._router.replicas.values()):
            raise EngineDeadError("no replica is ready", retry_after_s=_RETRY_AFTER_S)

    def reconfigure(self, scheduler: SchedulerConfig) -> None:  # noqa: ARG002
        """Raises `ConfigError`: replicas are replaced one by one, with other settings."""
        raise ConfigError(
            "the settings of a fleet are those that its replicas were started with; deploy it "
            "again with others, and they are replaced one after the other"
        )

    def submitted(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        service: ServiceParams,
        request_id: str,
        take: Take,
    ) -> AbstractAsyncContextManager[Submission]:
        """See `Engine.submitted`."""
        return self._submissions.submitted(
            prompts, params, service=service, request_id=request_id, take=take
        )

    async def close(self, *, at_once: bool = False) -> None:  # noqa: ARG002
        """Leave all replicas; what still runs is lost."""
        self._is_closed = True
        for one in self._submissions:
            self._submissions.fail(one, EngineDeadError(f"the fleet is gone: {self.death}"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._replicas.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_joining(self, door_id: str) -> None:
        """Be joined to each replica that comes."""
        while True:
            try:
                link = await Link.open(self._replicas, door_id)
            except Exception as error:
                logger.warning("cannot be joined to a replica: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if _is_like(link, self.info.model, self.info.max_model_len, self.info.vocab_size):
                self._begin(self._follow(link))
            else:
                logger.error("replica %s serves another model, and gets nothing", link.replica_id)
                self._begin(self._hold(link))

    async def _hold(self, link: Link) -> None:
        """Stay joined to a replica that is not used, so that it is not found again."""
        with contextlib.suppress(Exception):
            async for _ in link.messages():
                pass

    async def _follow(self, link: Link) -> None:
        """Use a replica until it ends."""
        replica_id = link.replica_id
        logger.info("replica %s is there", replica_id)
        self._links[replica_id] = link
        if self.vocabulary.num_ids:  # a caller may go without
            link.put(KnowVocabulary(self.vocabulary))
        if link.first_state is not None:
            self._note_state(link, link.first_state)
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
            self.num_restarts += not link.line.is_to_end.is_set()
            self._leave(link, "the replica ended while it held this request")

    async def _read(self, link: Link) -> None:
        async for message in link.messages():
            match message:
                case Brought():
                    self._take(link, message)
                case Tells(state=state):
                    self._note_state(link, state)
                case Lost():
                    self.num_restarts += 1
                    self._leave(link, "the engine process died while it held this request")
                case Missed(request_id=request_id):
                    self._place_again(link, request_id)
                case Joined():
                    raise AssertionError("a replica joins once")

    async def _drain(self, link: Link) -> None:
        """Once it is to end, let a replica end what it has."""
        await link.line.is_to_end.wait()
        logger.info("replica %s is about to end", link.replica_id)
        if link.replica_id in self._router.replicas:
            self._router.drain(link.replica_id)
        while any(placed.link is link for placed in self._placed.values()):
            await asyncio.sleep(_PAUSE_S)

    def _take(self, link: Link, brought: Brought) -> None:
        now_s = time.monotonic()
        link.stats = brought.stats
        self._router.note_kv_events(link.replica_id, brought.kv_events)
        outputs = [_on_our_clock(output, now_s - brought.sent_s) for output in brought.outputs]
        for output in outputs:
            self._note(output, now_s)
        given = self._submissions.take(outputs, now_s)
        self._deliveries.note(given, now_s, is_mixed=False)

    def _note(self, output: RequestOutput, now_s: float) -> None:
        placed = self._placed.get(output.request_id)
        if placed is None:
            return
        if output.new_token_ids and not placed.num_tokens:
            self._router.note_first_token(output.request_id, now_s)
        placed.num_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            self._end(output.request_id)

    def _end(self, request_id: str) -> None:
        placed = self._placed.pop(request_id)
        self._router.note_end(request_id, placed.num_tokens, time.monotonic())

    def _send(self, request: AddRequest) -> None:
        self._place(request)
        self.activity.note_sent(request)

    def _place(self, request: AddRequest) -> None:
        """Send a request to a replica, or let it wait for one."""
        try:
            placement = self._router.route(self._routed(request), time.monotonic())
        except NoReplicaError:
            self._unplaced[request.request_id] = request
            return
        link = self._links[placement.decode]
        self._placed[request.request_id] = _Placed(link)
        link.put(request)

    def _place_waiting(self) -> None:
        waiting, self._unplaced = self._unplaced, {}
        for request in waiting.values():
            self._place(request)

    def _routed(self, request: AddRequest) -> RoutedRequest:
        service, block_size = request.service, self.info.cache.block_size
        prompt = request.prompt_token_ids
        is_shared = self._router.asks_prefixes and service.cache_salt is None
        return RoutedRequest(
            request_id=request.request_id,
            num_prompt_tokens=len(prompt),
            slo=self.info.slo_classes[service.slo_class],
            tenant=service.tenant,
            block_hashes=(
                block_hashes(prompt[:_MOST_HASHED_TOKENS], block_size) if is_shared else ()
            ),
            block_size=block_size,
        )

    def _abort(self, request_id: str) -> None:
        self._unplaced.pop(request_id, None)
        placed = self._placed.get(request_id)
        if placed is not None:
            placed.link.put(AbortRequest(request_id=request_id))
            self._end(request_id)

    def _note_state(self, link: Link, state: ReplicaState) -> None:
        """What a replica tells; there is an engine, to which requests may go."""
        if link.replica_id not in self._router.replicas:
            self._router.join(link.replica_id)
            if link.line.is_to_end.is_set():
                self._router.drain(link.replica_id)
        self._router.note_state(link.replica_id, state, time.monotonic())
        self._place_waiting()

    def _place_again(self, link: Link, request_id: str) -> None:
        """What a replica had no engine for."""
        placed, one = self._placed.get(request_id), self._submissions.get(request_id)
        if placed is not None and placed.link is link and one is not None:
            self._end(request_id)
            self._place(one.request)

    def _leave(self, link: Link, why: str) -> None:
        """There is no engine. What has begun there, or was lost before, ends; the rest is run
        elsewhere."""
        if link.replica_id in self._router.replicas:
            self._router.leave(link.replica_id, time.monotonic())
        lost = [one for one, placed in self._placed.items() if placed.link is link]
        for request_id in lost:
            del self._placed[request_id]
        unfinished = [one for one in map(self._submissions.get, lost) if one is not None]
        num_rerun = sum(self._run_again(one, why) for one in unfinished)
        if unfinished:
            num_failed = len(unfinished) - num_rerun
            logger.warning(
                "replica %s had %d requests: %d of its requests are run elsewhere, and %d end",
                link.replica_id, len(unfinished), num_rerun, num_failed,
            )  # fmt: skip

    def _run_again(self, one: Unfinished, why: str) -> bool:
        """Or end it with an error; whether it is run elsewhere."""
        if one.has_begun or one.request.is_rerun:
            self._submissions.fail(one, EngineDeadError(why, retry_after_s=1.0))
            return False
        one.request = msgspec.structs.replace(one.request, is_rerun=True)
        self._place(one.request)
        return True


def _is_like(link: Link, model: str, max_model_len: int, vocab_size: int) -> bool:
    info = link.info
    return (info.model, info.max_model_len, info.vocab_size) == (model, max_model_len, vocab_size)


def _on_our_clock(output: RequestOutput, later_s: float) -> RequestOutput:
    if output.scheduled_s is None:
        return output
    return msgspec.structs.replace(output, scheduled_s=output.scheduled_s + later_s)
