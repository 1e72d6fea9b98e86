"""A discrete-event simulation of a corpus run on a cluster: one client, and replicas with continuous batching.

A replica works in steps. Each step decodes one token for each running sequence, and prefills up to `PREFILL_STEP`
tokens of the first prompt in the queue. The duration of a step follows the roofline model: it is the maximum of the
time to read the weights and the sequences' caches from memory, and the time for the arithmetic. A replica runs at most
`batch` sequences; other requests wait. Between two events, all rates are constant.

A document is read in stages. The requests of a stage are sent together, and the next stage starts when all of them are
answered. All requests of a document go to the same replica, unless that replica fails. A new document goes to the
replica with the fewest documents.

The simulation ignores the network, the cost of attention (small at 7,000 tokens) and cache eviction.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

PREFILL_STEP: Final = 2048
"""Maximum number of prompt tokens in one step."""

Strategy: TypeAlias = Literal["overwrite", "gated", "segments", "parallel"]


@dataclass(frozen=True, slots=True)
class Replica:
    """The speed of one replica of the model."""

    tokens_per_second: float
    """Tokens per second, if arithmetic is the bottleneck."""
    weights_seconds: float
    """The time to read the weights from memory once."""
    sequence_seconds: float
    """The time to read the cache of one sequence from memory."""
    batch: int
    """Maximum number of sequences that run at the same time."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The documents, the questions and the strategy."""

    documents: int
    mean_tokens: float = 100_000
    spread: float = 1.0
    """Sigma of the lognormal distribution of lengths. With 0, all documents have the same length."""
    longest: float = 5_000_000
    questions: int = 1
    strategy: Strategy = "overwrite"
    chunk_tokens: int = 5000
    memory_tokens: int = 600
    """Average tokens that an update writes."""
    answer_tokens: int = 100
    frame_tokens: int = 300
    """Tokens of the template and the question."""
    rewrite_share: float = 0.3
    """For `gated`: the share of chunks at which the memory is rewritten."""
    gate_tokens: int = 4
    """For `gated`: tokens written for a chunk without a rewrite."""
    segments: int = 8
    merge_size: int = 5
    """Memories that are merged in one request."""
    shares_sections: bool = True
    """Whether all questions about a chunk share its section in the prefix cache (needs the section first)."""

    @property
    def requests_at_once(self) -> int:
        """Average number of requests of one document that are in flight at the same time."""
        if self.strategy == "segments":
            return self.questions * self.segments
        if self.strategy == "parallel":
            return self.questions * max(1, round(self.mean_tokens / self.chunk_tokens))
        return self.questions


@dataclass(frozen=True, slots=True)
class Operation:
    """The cluster, the client, and the failures."""

    replicas: int
    requests_in_flight: int
    slow_share: float = 0.0
    """The share of replicas that are slow."""
    slow_rate: float = 0.5
    """The speed of a slow replica, relative to the others."""
    hours_between_failures: float = math.inf
    """Average time between failures of one replica."""
    repair_seconds: float = 300.0
    hours_between_kills: float = math.inf
    """Average time between kills of the client. Afterwards it continues each document at its current chunk."""
    restart_seconds: float = 60.0
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """The result of a simulation."""

    seconds: float = 0.0
    """Time until the last document is finished."""
    tail_seconds: float = 0.0
    """Time from the start of the last document to the end."""
    requests: int = 0
    """Requests that were answered."""
    repeats: int = 0
    """Requests that were lost in a failure or kill and sent again."""
    prompt_tokens: int = 0
    """All prompt tokens, including cached ones."""
    computed_tokens: int = 0
    """Prompt tokens that were not in the prefix cache."""
    reply_tokens: int = 0
    """Tokens that the replicas wrote."""
    busy_share: float = 0.0
    """The share of time in which the replicas were busy, from 0 to 1."""
    documents_per_second: float = 0.0
    """The rate in the steady state, between the starts of the first quarter and of the last document."""
    latencies: list[float] = field(default_factory=list)
    """The latency of each answered request in seconds."""


@dataclass(slots=True)
class _Request:
    document: _Document
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    send_time: float = 0.0
    """The time when the request was sent."""
    end_step: float = 0.0
    """The replica's step count at which the request is answered."""
    tokens_left: float = 0.0
    """Prompt tokens that are not yet prefilled."""


@dataclass(slots=True)
class _Document:
    number: int
    stages: Iterator[Sequence[tuple[int, int, int]]]
    replica: _ReplicaState | None = None
    open_requests: dict[int, _Request] = field(default_factory=dict)


class _ReplicaState:
    """The requests and the clock of one replica."""

    def __init__(self, replica: Replica, index: int, relative_speed: float) -> None:
        self.index, self._replica, self._relative_speed = index, replica, relative_speed
        self.documents = 0
        self.is_up = True
        self.version = 0
        self.busy_seconds = 0.0
        self._time = self._finished_steps = 0.0
        self._decoding: list[tuple[float, int, _Request]] = []
        self._prefilling: deque[_Request] = deque()
        self._queue: deque[_Request] = deque()
        self._started_count = 0

    def submit(self, request: _Request) -> None:
        """Add a request to the queue, and start it if the batch has room."""
        self._queue.append(request)
        self._admit()

    def advance(self, time: float) -> list[_Request]:
        """Advance to `time`, which must not be after the next event, and return the requests answered until then."""
        elapsed_seconds, self._time = time - self._time, time
        step_seconds = self._compute_step_seconds()
        if step_seconds:
            self.busy_seconds += elapsed_seconds
            self._finished_steps += elapsed_seconds / step_seconds if self._decoding else 0.0
            if self._prefilling:
                self._prefilling[0].tokens_left -= elapsed_seconds / step_seconds * PREFILL_STEP
        answered_requests = []
        if self._prefilling and self._prefilling[0].tokens_left <= 1e-3:
            request = self._prefilling.popleft()
            request.end_step = self._finished_steps + request.reply_tokens
            self._started_count += 1
            heapq.heappush(self._decoding, (request.end_step, self._started_count, request))
        while self._decoding and self._decoding[0][0] <= self._finished_steps + 1e-6:
            answered_requests.append(heapq.heappop(self._decoding)[2])
        self._admit()
        return answered_requests

    def compute_next_event_time(self) -> float:
        """Return the time of the next event, or infinity if the replica is idle."""
        step_seconds = self._compute_step_seconds()
        if not step_seconds:
            return math.inf
        steps_left = math.inf
        if self._decoding:
            steps_left = self._decoding[0][0] - self._finished_steps
        if self._prefilling:
            steps_left = min(steps_left, self._prefilling[0].tokens_left / PREFILL_STEP)
        return self._time + max(steps_left, 0.0) * step_seconds

    def drop_requests(self) -> None:
        """Drop all requests."""
        self._decoding.clear()
        self._prefilling.clear()
        self._queue.clear()

    def _admit(self) -> None:
        while self._queue and len(self._decoding) + len(self._prefilling) < self._replica.batch:
            request = self._queue.popleft()
            request.tokens_left = max(1, request.prompt_tokens - request.cached_tokens)
            self._prefilling.append(request)

    def _compute_step_seconds(self) -> float:
        """Return the duration of a step in seconds, or 0 if the replica is idle."""
        if not (self._decoding or self._prefilling):
            return 0.0
        sequence_count = len(self._decoding)
        memory_seconds = self._replica.weights_seconds + sequence_count * self._replica.sequence_seconds
        token_count = sequence_count + (PREFILL_STEP if self._prefilling else 0)
        return max(memory_seconds, token_count / self._replica.tokens_per_second) / self._relative_speed


class _Simulation:
    def __init__(self, replica: Replica, workload: Workload, operation: Operation) -> None:
        self._workload, self._operation = workload, operation
        self._random = random.Random(operation.seed)
        slow_count = round(operation.slow_share * operation.replicas)
        self._replicas = [
            _ReplicaState(replica, index, operation.slow_rate if index < slow_count else 1.0)
            for index in range(operation.replicas)
        ]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._event_count = 0
        self._documents_left = workload.documents
        self._documents: dict[int, _Document] = {}
        self._time = self._last_start = 0.0
        self._is_killed = False
        self._first_quarter = (0.0, 0)
        """The time when a quarter of the documents had started, and the number of requests answered by then."""
        self._requests_at_last_start = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        documents_in_flight = max(1, self._operation.requests_in_flight // self._workload.requests_at_once)
        for replica in self._replicas:
            self._plan_failure(replica)
        self._plan_kill()
        for _ in range(min(documents_in_flight, self._documents_left)):
            self._start_document()
        while self._documents:
            self._time, _, kind, replica_index, version = heapq.heappop(self._events)
            if kind == "work":
                replica = self._replicas[replica_index]
                if version == replica.version:
                    self._advance_and_schedule(replica)
            elif kind == "failure":
                self._fail_replica(self._replicas[replica_index])
            elif kind == "repair":
                self._replicas[replica_index].is_up = True
                self._plan_failure(self._replicas[replica_index])
            elif kind == "kill":
                self._kill_client()
            else:
                self._resume_client()
        return self._compute_outcome()

    def _compute_outcome(self) -> Outcome:
        outcome, document_count = self.outcome, self._workload.documents
        outcome.seconds, outcome.tail_seconds = self._time, self._time - self._last_start
        quarter_start, early_requests = self._first_quarter
        elapsed_seconds = self._last_start - quarter_start
        requests_per_document = outcome.requests / document_count
        outcome.documents_per_second = (
            (self._requests_at_last_start - early_requests) / elapsed_seconds / requests_per_document
            if elapsed_seconds > 0
            else document_count / self._time
        )
        outcome.busy_share = sum(replica.busy_seconds for replica in self._replicas) / (
            len(self._replicas) * self._time
        )
        return outcome

    # Documents

    def _start_document(self) -> None:
        self._documents_left -= 1
        document_number = self._documents_left
        self._documents[document_number] = document = _Document(
            document_number, plan_stages(self._workload, make_document_rng(self._operation.seed, document_number))
        )
        self._last_start, self._requests_at_last_start = self._time, self.outcome.requests
        if self._documents_left == self._workload.documents * 3 // 4:
            self._first_quarter = (self._time, self.outcome.requests)
        self._assign_replica(document)
        self._send_next_stage(document)

    def _assign_replica(self, document: _Document) -> None:
        running_replicas = [replica for replica in self._replicas if replica.is_up] or self._replicas
        document.replica = min(running_replicas, key=lambda replica: replica.documents)
        document.replica.documents += 1

    def _send_next_stage(self, document: _Document) -> None:
        stage = next(document.stages, None)
        if stage is None:
            del self._documents[document.number]
            assert document.replica is not None
            document.replica.documents -= 1
            if self._documents_left:
                self._start_document()
            return
        for prompt, cached_tokens, reply_tokens in stage:
            request = _Request(document, prompt, cached_tokens, reply_tokens)
            document.open_requests[id(request)] = request
            self._send(request)

    def _send(self, request: _Request) -> None:
        replica = request.document.replica
        assert replica is not None
        self._advance(replica)
        request.send_time = self._time
        replica.submit(request)
        self._schedule(replica)

    # Replicas

    def _advance_and_schedule(self, replica: _ReplicaState) -> None:
        self._advance(replica)
        self._schedule(replica)

    def _advance(self, replica: _ReplicaState) -> None:
        documents_with_finished_stage = []
        for request in replica.advance(self._time):
            outcome, document = self.outcome, request.document
            outcome.requests += 1
            outcome.prompt_tokens += request.prompt_tokens
            outcome.computed_tokens += request.prompt_tokens - request.cached_tokens
            outcome.reply_tokens += request.reply_tokens
            outcome.latencies.append(self._time - request.send_time)
            del document.open_requests[id(request)]
            if not document.open_requests:
                documents_with_finished_stage.append(document)
        for document in documents_with_finished_stage:
            self._send_next_stage(document)

    def _schedule(self, replica: _ReplicaState) -> None:
        replica.version += 1
        event_time = replica.compute_next_event_time()
        if event_time < math.inf:
            self._add_event(event_time, "work", replica.index, replica.version)

    # Failures

    def _plan_failure(self, replica: _ReplicaState) -> None:
        if self._operation.hours_between_failures < math.inf:
            seconds = self._random.expovariate(1 / (3600 * self._operation.hours_between_failures))
            self._add_event(self._time + seconds, "failure", replica.index)

    def _plan_kill(self) -> None:
        if self._operation.hours_between_kills < math.inf:
            seconds = self._random.expovariate(1 / (3600 * self._operation.hours_between_kills))
            self._add_event(self._time + seconds, "kill", 0)

    def _fail_replica(self, replica: _ReplicaState) -> None:
        self._advance(replica)
        replica.drop_requests()
        replica.is_up = False
        replica.version += 1
        self._add_event(self._time + self._operation.repair_seconds, "repair", replica.index)
        for document in [document for document in self._documents.values() if document.replica is replica]:
            replica.documents -= 1
            self._assign_replica(document)
            if not self._is_killed:
                self._repeat_requests(document)

    def _kill_client(self) -> None:
        self._is_killed = True
        for replica in self._replicas:
            self._advance(replica)
            replica.drop_requests()
            replica.version += 1
        self._add_event(self._time + self._operation.restart_seconds, "resume", 0)

    def _resume_client(self) -> None:
        self._is_killed = False
        self._plan_kill()
        for document in list(self._documents.values()):
            self._repeat_requests(document)

    def _repeat_requests(self, document: _Document) -> None:
        for request in list(document.open_requests.values()):
            self.outcome.repeats += 1
            self._send(request)

    def _add_event(self, event_time: float, kind: str, replica_index: int, version: int = 0) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (event_time, self._event_count, kind, replica_index, version))


def make_document_rng(seed: int, document_number: int) -> random.Random:
    """Return the random generator of a document, whose length is then the same for all strategies."""
    return random.Random(seed * 1_000_003 + document_number)


def plan_stages(workload: Workload, rng: random.Random) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Yield the stages of a document.

    A stage is a list of requests, each with three numbers: its prompt tokens, those in the cache, and its reply tokens.
    """
    tokens = workload.mean_tokens
    if workload.spread:
        mu = math.log(workload.mean_tokens) - workload.spread**2 / 2
        tokens = min(workload.longest, rng.lognormvariate(mu, workload.spread))
    chunk_count = max(1, math.ceil(tokens / workload.chunk_tokens))
    section_tokens = math.ceil(tokens / chunk_count)
    memory_tokens, frame_tokens, questions = workload.memory_tokens, workload.frame_tokens, workload.questions
    update_prompt = section_tokens + memory_tokens + frame_tokens

    def repeat_for_questions(prompt: int, reply_tokens: int, cached_tokens: int = 0) -> list[tuple[int, int, int]]:
        cached_tokens = cached_tokens if workload.shares_sections else 0
        return [(prompt, cached_tokens if question_index else 0, reply_tokens) for question_index in range(questions)]

    if workload.strategy == "parallel":
        yield repeat_for_questions(update_prompt, memory_tokens, section_tokens) * chunk_count
        yield from _plan_merges(chunk_count, workload)
    elif workload.strategy == "segments":
        segments = min(workload.segments, chunk_count)
        for start in range(0, chunk_count, segments):
            chunks_of_stage = min(segments, chunk_count - start)
            yield repeat_for_questions(update_prompt, memory_tokens, section_tokens) * chunks_of_stage
        yield from _plan_merges(segments, workload)
    else:
        for _ in range(chunk_count):
            requests = repeat_for_questions(update_prompt, memory_tokens, section_tokens)
            if workload.strategy == "gated":
                requests = [
                    (prompt, cached, reply_tokens if rng.random() < workload.rewrite_share else workload.gate_tokens)
                    for prompt, cached, reply_tokens in requests
                ]
            yield requests
    yield repeat_for_questions(memory_tokens + frame_tokens, workload.answer_tokens)


def _plan_merges(memory_count: int, workload: Workload) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Yield the stages that merge memories until one is left."""
    while memory_count > 1:
        group_count = math.ceil(memory_count / workload.merge_size)
        prompt_tokens = math.ceil(memory_count / group_count) * workload.memory_tokens + workload.frame_tokens
        yield [(prompt_tokens, 0, workload.memory_tokens)] * (group_count * workload.questions)
        memory_count = group_count


def simulate(replica: Replica, workload: Workload, operation: Operation) -> Outcome:
    """Simulate the reading of all documents, and return the times and counts."""
    return _Simulation(replica, workload, operation).run()
