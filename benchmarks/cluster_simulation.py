"""A discrete-event simulation of a corpus on a cluster: one client, and replicas with continuous batching.

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
    merged: int = 5
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
    served: int = 0
    """Answered requests."""
    repeated: int = 0
    """Requests that were lost in a failure or kill and sent again."""
    prompt_tokens: int = 0
    """All prompt tokens, including cached ones."""
    computed_tokens: int = 0
    """Prompt tokens that were not in the prefix cache."""
    written_tokens: int = 0
    busy: float = 0.0
    """The share of time in which the replicas were busy, 0 to 1."""
    rate: float = 0.0
    """Documents per second in the steady state: between the starts of the first quarter and of the last document."""
    latencies: list[float] = field(default_factory=list)
    """The latency of each answered request in seconds."""


@dataclass(slots=True)
class _Request:
    document: _Document
    prompt: int
    cached: int
    written: int
    sent: float = 0.0
    end: float = 0.0
    """The replica's step count at which the request is answered."""
    left: float = 0.0
    """Prompt tokens that are not yet prefilled."""


@dataclass(slots=True)
class _Document:
    number: int
    stages: Iterator[Sequence[tuple[int, int, int]]]
    replica: _Machine | None = None
    open: dict[int, _Request] = field(default_factory=dict)


class _Machine:
    """The state of one replica."""

    def __init__(self, replica: Replica, number: int, rate: float) -> None:
        self.number, self._replica, self._rate = number, replica, rate
        self.documents = 0
        self.is_up = True
        self.version = 0
        self.busy = 0.0
        self._now = self._steps = 0.0
        self._writing: list[tuple[float, int, _Request]] = []
        self._reading: deque[_Request] = deque()
        self._waiting: deque[_Request] = deque()
        self._count = 0

    def submit(self, request: _Request) -> None:
        self._waiting.append(request)
        self._admit()

    def advance(self, time: float) -> list[_Request]:
        """Advance to `now`, which must not be after the next event, and return the requests answered until then."""
        span, self._now = time - self._now, time
        step = self._step()
        if step:
            self.busy += span
            self._steps += span / step if self._writing else 0.0
            if self._reading:
                self._reading[0].left -= span / step * PREFILL_STEP
        answered = []
        if self._reading and self._reading[0].left <= 1e-3:
            request = self._reading.popleft()
            request.end = self._steps + request.written
            self._count += 1
            heapq.heappush(self._writing, (request.end, self._count, request))
        while self._writing and self._writing[0][0] <= self._steps + 1e-6:
            answered.append(heapq.heappop(self._writing)[2])
        self._admit()
        return answered

    def next_event(self) -> float:
        """Return the time of the next event; infinity if the replica is idle."""
        step = self._step()
        if not step:
            return math.inf
        steps = math.inf
        if self._writing:
            steps = self._writing[0][0] - self._steps
        if self._reading:
            steps = min(steps, self._reading[0].left / PREFILL_STEP)
        return self._now + max(steps, 0.0) * step

    def drop(self) -> None:
        """Drop all requests."""
        self._writing.clear()
        self._reading.clear()
        self._waiting.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._writing) + len(self._reading) < self._replica.batch:
            request = self._waiting.popleft()
            request.left = max(1, request.prompt - request.cached)
            self._reading.append(request)

    def _step(self) -> float:
        """Return the duration of a step in seconds; 0 if the replica is idle."""
        if not (self._writing or self._reading):
            return 0.0
        sequences = len(self._writing)
        memory = self._replica.weights_seconds + sequences * self._replica.sequence_seconds
        tokens = sequences + (PREFILL_STEP if self._reading else 0)
        return max(memory, tokens / self._replica.tokens_per_second) / self._rate


class _Simulation:
    def __init__(self, replica: Replica, workload: Workload, operation: Operation) -> None:
        self._workload, self._operation = workload, operation
        self._random = random.Random(operation.seed)
        slow = round(operation.slow_share * operation.replicas)
        self._machines = [
            _Machine(replica, number, operation.slow_rate if number < slow else 1.0)
            for number in range(operation.replicas)
        ]
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = 0
        self._left = workload.documents
        self._documents: dict[int, _Document] = {}
        self._now = self._last_start = 0.0
        self._is_killed = False
        self._quarter = (0.0, 0)
        """The time when a quarter of the documents had started, and the number of requests served by then."""
        self._served_at_last_start = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        documents_in_flight = max(1, self._operation.requests_in_flight // self._workload.requests_at_once)
        for machine in self._machines:
            self._plan_failure(machine)
        self._plan_kill()
        for _ in range(min(documents_in_flight, self._left)):
            self._start()
        while self._documents:
            self._now, _, kind, number, version = heapq.heappop(self._events)
            if kind == "work":
                machine = self._machines[number]
                if version == machine.version:
                    self._work(machine)
            elif kind == "failure":
                self._fail(self._machines[number])
            elif kind == "repair":
                self._machines[number].is_up = True
                self._plan_failure(self._machines[number])
            elif kind == "kill":
                self._kill()
            else:
                self._resume()
        return self._finished_outcome()

    def _finished_outcome(self) -> Outcome:
        outcome, documents = self.outcome, self._workload.documents
        outcome.seconds, outcome.tail_seconds = self._now, self._now - self._last_start
        quarter_start, early_requests = self._quarter
        span = self._last_start - quarter_start
        requests = outcome.served / documents
        outcome.rate = (
            (self._served_at_last_start - early_requests) / span / requests if span > 0 else documents / self._now
        )
        outcome.busy = sum(machine.busy for machine in self._machines) / (len(self._machines) * self._now)
        return outcome

    # Documents

    def _start(self) -> None:
        self._left -= 1
        number = self._left
        self._documents[number] = document = _Document(
            number, stages_of(self._workload, document_random(self._operation.seed, number))
        )
        self._last_start, self._served_at_last_start = self._now, self.outcome.served
        if self._left == self._workload.documents * 3 // 4:
            self._quarter = (self._now, self.outcome.served)
        self._place(document)
        self._next_stage(document)

    def _place(self, document: _Document) -> None:
        up = [machine for machine in self._machines if machine.is_up] or self._machines
        document.replica = min(up, key=lambda machine: machine.documents)
        document.replica.documents += 1

    def _next_stage(self, document: _Document) -> None:
        stage = next(document.stages, None)
        if stage is None:
            del self._documents[document.number]
            assert document.replica is not None
            document.replica.documents -= 1
            if self._left:
                self._start()
            return
        for prompt, cached_tokens, reply_tokens in stage:
            request = _Request(document, prompt, cached_tokens, reply_tokens)
            document.open[id(request)] = request
            self._send(request)

    def _send(self, request: _Request) -> None:
        machine = request.document.replica
        assert machine is not None
        self._advance(machine)
        request.sent = self._now
        machine.submit(request)
        self._schedule(machine)

    # Replicas

    def _work(self, machine: _Machine) -> None:
        self._advance(machine)
        self._schedule(machine)

    def _advance(self, machine: _Machine) -> None:
        ready = []
        for request in machine.advance(self._now):
            outcome, document = self.outcome, request.document
            outcome.served += 1
            outcome.prompt_tokens += request.prompt
            outcome.computed_tokens += request.prompt - request.cached
            outcome.written_tokens += request.written
            outcome.latencies.append(self._now - request.sent)
            del document.open[id(request)]
            if not document.open:
                ready.append(document)
        for document in ready:
            self._next_stage(document)

    def _schedule(self, machine: _Machine) -> None:
        machine.version += 1
        when = machine.next_event()
        if when < math.inf:
            self._plan(when, "work", machine.number, machine.version)

    # Failures

    def _plan_failure(self, machine: _Machine) -> None:
        if self._operation.hours_between_failures < math.inf:
            seconds = self._random.expovariate(1 / (3600 * self._operation.hours_between_failures))
            self._plan(self._now + seconds, "failure", machine.number)

    def _plan_kill(self) -> None:
        if self._operation.hours_between_kills < math.inf:
            seconds = self._random.expovariate(1 / (3600 * self._operation.hours_between_kills))
            self._plan(self._now + seconds, "kill", 0)

    def _fail(self, machine: _Machine) -> None:
        self._advance(machine)
        machine.drop()
        machine.is_up = False
        machine.version += 1
        self._plan(self._now + self._operation.repair_seconds, "repair", machine.number)
        for document in [document for document in self._documents.values() if document.replica is machine]:
            machine.documents -= 1
            self._place(document)
            if not self._is_killed:
                self._send_again(document)

    def _kill(self) -> None:
        self._is_killed = True
        for machine in self._machines:
            self._advance(machine)
            machine.drop()
            machine.version += 1
        self._plan(self._now + self._operation.restart_seconds, "resume", 0)

    def _resume(self) -> None:
        self._is_killed = False
        self._plan_kill()
        for document in list(self._documents.values()):
            self._send_again(document)

    def _send_again(self, document: _Document) -> None:
        for request in list(document.open.values()):
            self.outcome.repeated += 1
            self._send(request)

    def _plan(self, when: float, kind: str, number: int, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, kind, number, version))


def document_random(seed: int, number: int) -> random.Random:
    """Return the random generator of a document. Its length is the same for all strategies."""
    return random.Random(seed * 1_000_003 + number)


def stages_of(workload: Workload, rng: random.Random) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Yield the stages of a document.

    Each stage is a list of requests with three numbers: prompt tokens, cached prompt tokens and written tokens.
    """
    tokens = workload.mean_tokens
    if workload.spread:
        mu = math.log(workload.mean_tokens) - workload.spread**2 / 2
        tokens = min(workload.longest, rng.lognormvariate(mu, workload.spread))
    chunks = max(1, math.ceil(tokens / workload.chunk_tokens))
    length = math.ceil(tokens / chunks)
    memory, frame, questions = workload.memory_tokens, workload.frame_tokens, workload.questions
    update_prompt = length + memory + frame

    def each_question(prompt: int, reply_tokens: int, cached_tokens: int = 0) -> list[tuple[int, int, int]]:
        cached_tokens = cached_tokens if workload.shares_sections else 0
        return [(prompt, cached_tokens if number else 0, reply_tokens) for number in range(questions)]

    if workload.strategy == "parallel":
        yield each_question(update_prompt, memory, length) * chunks
        yield from _merges(chunks, workload)
    elif workload.strategy == "segments":
        segments = min(workload.segments, chunks)
        for start in range(0, chunks, segments):
            count = min(segments, chunks - start)
            yield each_question(update_prompt, memory, length) * count
        yield from _merges(segments, workload)
    else:
        for _ in range(chunks):
            requests = each_question(update_prompt, memory, length)
            if workload.strategy == "gated":
                requests = [
                    (prompt, cached_tokens, reply_tokens if rng.random() < workload.rewrites else workload.gate_tokens)
                    for prompt, cached_tokens, reply_tokens in requests
                ]
            yield requests
    yield each_question(memory + frame, workload.answer_tokens)


def _merges(memories: int, workload: Workload) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Yield the stages that merge memories until one is left."""
    while memories > 1:
        groups = math.ceil(memories / workload.merged)
        prompt = math.ceil(memories / groups) * workload.memory_tokens + workload.frame_tokens
        yield [(prompt, 0, workload.memory_tokens)] * (groups * workload.questions)
        memories = groups


def simulate(replica: Replica, workload: Workload, operation: Operation) -> Outcome:
    """Simulate the reading of all documents."""
    return _Simulation(replica, workload, operation).run()
