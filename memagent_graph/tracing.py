"""Under which trace a step runs: ids that let a run in the log be matched with LangSmith and OpenTelemetry."""

from __future__ import annotations

import sys

from langchain_core.runnables import RunnableConfig


def trace_ids(config: RunnableConfig | None) -> dict[str, str]:
    """The ids of the LangChain run and of the OpenTelemetry span around a step, where someone is tracing."""
    ids: dict[str, str] = {}
    callbacks = (config or {}).get("callbacks")
    if getattr(callbacks, "handlers", None) and (parent := getattr(callbacks, "parent_run_id", None)):
        ids["langchain_run_id"] = str(parent)
    if (opentelemetry := sys.modules.get("opentelemetry.trace")) is not None:
        span = opentelemetry.get_current_span().get_span_context()
        if span.is_valid:
            ids["otel_trace_id"] = f"{span.trace_id:032x}"
            ids["otel_span_id"] = f"{span.span_id:016x}"
    return ids
