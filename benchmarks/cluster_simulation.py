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
    rewrites: float = 0.3
    """For `gated`: the share of chunks for which the memory is rewritten."""
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
    rate: float = 0.0
    """Documents per second in the steady state: between the starts of the first quarter and of the last document."""
    latencies: list[float] = field(default_factory=list)
    """The latency of each answered request in seconds."""


@dataclass(slots=True)
class _Request:
    document: _Document
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    start: float = 0.0
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

    def __init__(self, replica: Replica, number: int, rate: float) -> None:
        self.number, self._replica, self._rate = number, replica, rate
        self.documents = 0
        self.is_up = True
        self.version = 0
        self.busy = 0.0
        self._time = self._steps = 0.0
        self._decoding: list[tuple[float, int, _Request]] = []
        self._prefilling: deque[_Request] = deque()
        self._queue: deque[_Request] = deque()
        self._count = 0

    def submit(self, request: _Request) -> None:
        """Add a request to the queue, and start it if the batch has room."""
        self._queue.append(request)
        self._admit()

    def advance(self, time: float) -> list[_Request]:
        """Advance to `time`, which must not be after the next event, and return the requests answered until then."""
        span, self._time = time - self._time, time
        step = self._step()
        if step:
            self.busy += span
            self._steps += span / step if self._decoding else 0.0
            if self._prefilling:
                self._prefilling[0].tokens_left -= span / step * PREFILL_STEP
        answers = []
        if self._prefilling and self._prefilling[0].tokens_left <= 1e-3:
            request = self._prefilling.popleft()
            request.end_step = self._steps + request.reply_tokens
            self._count += 1
            heapq.heappush(self._decoding, (request.end_step, self._count, request))
        while self._decoding and self._decoding[0][0] <= self._steps + 1e-6:
            answers.append(heapq.heappop(self._decoding)[2])
        self._admit()
        return answers

    def next_event(self) -> float:
        """Return the time of the next event, or infinity if the replica is idle."""
        step = self._step()
        if not step:
            return math.inf
        steps = math.inf
        if self._decoding:
            steps = self._decoding[0][0] - self._steps
        if self._prefilling:
            steps = min(steps, self._prefilling[0].tokens_left / PREFILL_STEP)
        return self._time + max(steps, 0.0) * step

    def drop(self) -> None:
        """Drop all requests."""
        self._decoding.clear()
        self._prefilling.clear()
        self._queue.clear()

    def _admit(self) -> None:
        while self._queue and len(self._decoding) + len(self._prefilling) < self._replica.batch:
            request = self._queue.popleft()
            request.tokens_left = max(1, request.prompt_tokens - request.cached_tokens)
            self._prefilling.append(request)

    def _step(self) -> float:
        """Return the duration of a step in seconds, or 0 if the replica is idle."""
        if not (self._decoding or self._prefilling):
            return 0.0
        sequences = len(self._decoding)
        memory = self._replica.weights_seconds + sequences * self._replica.sequence_seconds
        tokens = sequences + (PREFILL_STEP if self._prefilling else 0)
        return max(memory, tokens / self._replica.tokens_per_second) / self._rate


class _Simulation:
    def __init__(self, replica: Replica, workload: Workload, operation: Operation) -> None:
        self._workload, self._operation = workload, operation
        self._random = random.Random(operation.seed)
        slow = round(operation.slow_share * operation.replicas)
        self._machines = [
            _ReplicaState(replica, number, operation.slow_rate if number < slow else 1.0)
            for number in range(operation.replicas)
        ]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._event_count = 0
        self._documents_left = workload.documents
        self._documents: dict[int, _Document] = {}
        self._time = self._last_start = 0.0
        self._is_killed = False
        self._quarter = (0.0, 0)
        """The time when a quarter of the documents had started, and the number of requests served by then."""
        self._requests_at_last_start = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        documents_in_flight = max(1, self._operation.requests_in_flight // self._workload.requests_at_once)
        for machine in self._machines:
            self._plan_failure(machine)
        self._plan_kill()
        for _ in range(min(documents_in_flight, self._documents_left)):
            self._start_document()
        while self._documents:
            self._time, _, kind, number, version = heapq.heappop(self._events)
            if kind == "work":
                machine = self._machines[number]
                if version == machine.version:
                    self._advance_and_schedule(machine)
            elif kind == "failure":
                self._fail_replica(self._machines[number])
            elif kind == "repair":
                self._machines[number].is_up = True
                self._plan_failure(self._machines[number])
            elif kind == "kill":
                self._kill_client()
            else:
                self._resume_client()
        return self._compute_outcome()

    def _compute_outcome(self) -> Outcome:
        outcome, documents = self.outcome, self._workload.documents
        outcome.seconds, outcome.tail_seconds = self._time, self._time - self._last_start
        quarter_start, early_requests = self._quarter
        span = self._last_start - quarter_start
        requests = outcome.requests / documents
        outcome.rate = (
            (self._requests_at_last_start - early_requests) / span / requests if span > 0 else documents / self._time
        )
        outcome.busy_share = sum(machine.busy for machine in self._machines) / (len(self._machines) * self._time)
        return outcome

    # Documents

    def _start_document(self) -> None:
        self._documents_left -= 1
        number = self._documents_left
        self._documents[number] = document = _Document(
            number, plan_stages(self._workload, make_document_rng(self._operation.seed, number))
        )
        self._last_start, self._requests_at_last_start = self._time, self.outcome.requests
        if self._documents_left == self._workload.documents * 3 // 4:
            self._quarter = (self._time, self.outcome.requests)
        self._assign_replica(document)
        self._send_next_stage(document)

    def _assign_replica(self, document: _Document) -> None:
        up = [machine for machine in self._machines if machine.is_up] or self._machines
        document.replica = min(up, key=lambda machine: machine.documents)
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
        machine = request.document.replica
        assert machine is not None
        self._advance(machine)
        request.start = self._time
        machine.submit(request)
        self._schedule(machine)

    # Replicas

    def _advance_and_schedule(self, machine: _ReplicaState) -> None:
        self._advance(machine)
        self._schedule(machine)

    def _advance(self, machine: _ReplicaState) -> None:
        ready = []
        for request in machine.advance(self._time):
            outcome, document = self.outcome, request.document
            outcome.requests += 1
            outcome.prompt_tokens += request.prompt_tokens
            outcome.computed_tokens += request.prompt_tokens - request.cached_tokens
            outcome.reply_tokens += request.reply_tokens
            outcome.latencies.append(self._time - request.start)
            del document.open_requests[id(request)]
            if not document.open_requests:
                ready.append(document)
        for document in ready:
            self._send_next_stage(document)

    def _schedule(self, machine: _ReplicaState) -> None:
        machine.version += 1
        when = machine.next_event()
        if when < math.inf:
            self._add_event(when, "work", machine.number, machine.version)

    # Failures

    def _plan_failure(self, machine: _ReplicaState) -> None:
        if self._operation.hours_between_failures < math.inf:
            seconds = self._random.expovariate(1 / (3600 * self._operation.hours_between_failures))
            self._add_event(self._time + seconds, "failure", machine.number)

    def _plan_kill(self) -> None:
        if self._operation.hours_between_kills < math.inf:
            seconds = self._random.expovariate(1 / (3600 * self._operation.hours_between_kills))
            self._add_event(self._time + seconds, "kill", 0)

    def _fail_replica(self, machine: _ReplicaState) -> None:
        self._advance(machine)
        machine.drop()
        machine.is_up = False
        machine.version += 1
        self._add_event(self._time + self._operation.repair_seconds, "repair", machine.number)
        for document in [document for document in self._documents.values() if document.replica is machine]:
            machine.documents -= 1
            self._assign_replica(document)
            if not self._is_killed:
                self._repeat_requests(document)

    def _kill_client(self) -> None:
        self._is_killed = True
        for machine in self._machines:
            self._advance(machine)
            machine.drop()
            machine.version += 1
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

    def _add_event(self, when: float, kind: str, number: int, version: int = 0) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (when, self._event_count, kind, number, version))


def make_document_rng(seed: int, number: int) -> random.Random:
    """Return the random generator of a document, whose length is then the same for all strategies."""
    return random.Random(seed * 1_000_003 + number)


def plan_stages(workload: Workload, rng: random.Random) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Yield the stages of a document.

    A stage is a list of requests, each with three numbers: its prompt tokens, those in the cache, and its reply tokens.
    """
    tokens = workload.mean_tokens
    if workload.spread:
        mu = math.log(workload.mean_tokens) - workload.spread**2 / 2
        tokens = min(workload.longest, rng.lognormvariate(mu, workload.spread))
    chunks = max(1, math.ceil(tokens / workload.chunk_tokens))
    length = math.ceil(tokens / chunks)
    memory, frame, questions = workload.memory_tokens, workload.frame_tokens, workload.questions
    update_prompt = length + memory + frame

    def repeat_for_questions(prompt: int, reply_tokens: int, cached_tokens: int = 0) -> list[tuple[int, int, int]]:
        cached_tokens = cached_tokens if workload.shares_sections else 0
        return [(prompt, cached_tokens if number else 0, reply_tokens) for number in range(questions)]

    if workload.strategy == "parallel":
        yield repeat_for_questions(update_prompt, memory, length) * chunks
        yield from _plan_merges(chunks, workload)
    elif workload.strategy == "segments":
        segments = min(workload.segments, chunks)
        for start in range(0, chunks, segments):
            count = min(segments, chunks - start)
            yield repeat_for_questions(update_prompt, memory, length) * count
        yield from _plan_merges(segments, workload)
    else:
        for _ in range(chunks):
            requests = repeat_for_questions(update_prompt, memory, length)
            if workload.strategy == "gated":
                requests = [
                    (prompt, cached_tokens, reply_tokens if rng.random() < workload.rewrites else workload.gate_tokens)
                    for prompt, cached_tokens, reply_tokens in requests
                ]
            yield requests
    yield repeat_for_questions(memory + frame, workload.answer_tokens)


def _plan_merges(memories: int, workload: Workload) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Yield the stages that merge memories until one is left."""
    while memories > 1:
        groups = math.ceil(memories / workload.merge_size)
        prompt = math.ceil(memories / groups) * workload.memory_tokens + workload.frame_tokens
        yield [(prompt, 0, workload.memory_tokens)] * (groups * workload.questions)
        memories = groups


def simulate(replica: Replica, workload: Workload, operation: Operation) -> Outcome:
    """Simulate the reading of all documents, and return the times and counts."""
    return _Simulation(replica, workload, operation).run()
