"""Counters for Prometheus. No label has a key's name, a document or a text."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from memagent_graph.policy import TokenUsage
from memagent_graph.results import Usage

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """The metrics of one server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._make_counter("requests", "Requests by path and status.", "path", "status")
        help_text, labels = "Seconds until a reply began.", ["path"]
        self.request_seconds = Histogram(
            "memagent_request_seconds", help_text, labels, buckets=_BUCKETS, registry=self._registry
        )
        self.completions = self._make_counter(
            "completions", "Chat completions by outcome: passed, read, read_and_passed.", "way"
        )
        help_text = "Requested reads: started, joined, resumed, repeated, refused."
        self.reads = self._make_counter("reads_asked", help_text, "kind")
        self.ended_reads = self._make_counter(
            "reads_ended", "Reads that ended: finished, stopped, failed, cancelled.", "state"
        )
        self.tokens = self._make_counter("tokens", "Tokens used by reads: prompt, completion, cached.", "kind")

    def _make_counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"memagent_{name}", help_text, labels, registry=self._registry)

    def add_gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed on request."""
        Gauge(name, help_text, registry=self._registry).set_function(value)

    def count_tokens(self, usage: Usage | TokenUsage) -> None:
        """Count the tokens of a read, or of a single answer."""
        self.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.tokens.labels("completion").inc(usage.completion_tokens)
        self.tokens.labels("cached").inc(usage.cached_tokens)

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
