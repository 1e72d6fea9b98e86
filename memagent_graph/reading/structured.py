"""Structured answers: the parts of a read that depend on a `response_format`, for every strategy.

The answer prompt shows the schema, the server is asked for guided decoding, and every reply is validated. A reply that
does not match the schema goes back to the policy with the error, in the role `repair`, at most `UpdateRules.retries`
times. If no reply matches, the last one is the answer, the run has no value, and it stops with `invalid_answer`. Memory
prompts name the answer's fields after the question, so that the memory keeps them.

A policy that understands only its own prompts is shown no schema; its decoding is guided, its replies are validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from memagent_graph.errors import RunMismatchError
from memagent_graph.prompts import ANSWER_FIELDS, AnswerFormat, Prompts, PromptTemplate, read_template
from memagent_graph.reading.state import SCHEMA_PREFIX, ReaderContext
from memagent_graph.response_format import ResponseFormat, ResponseFormatSource
from memagent_graph.roles import ANSWER, REPAIR, complete_prompts, read_answer_instructions, require_room

ERROR_TOKENS: Final = 256
"""Maximum tokens of the error message in a repair prompt."""
_LOG_KEY: Final = "response_format"


def with_response_format(context: ReaderContext, source: ResponseFormatSource | None) -> ReaderContext:
    """Return the context of a read with a structured answer; with None, the context unchanged.

    Args:
        context: the context of a graph.
        source: a source for `ResponseFormat.of`, or None.

    Raises:
        ResponseFormatError, MissingExtraError: as `ResponseFormat.of`.
        BudgetError: the schema does not fit the prompts of the answer.
    """
    if source is None:
        return context
    response_format = ResponseFormat.of(source)
    prompts = replace(context.prompts, answer_format=AnswerFormat.PLAIN)
    outline = ""
    if not context.trained_prompts_only:
        prompts = _with_schema(prompts)
        budget, count = context.budget, context.tokenizer.count
        schema_tokens = count(prompts.neutralise(response_format.schema_json))
        lengths = {"schema": schema_tokens, "reply": budget.answer_tokens, "error": ERROR_TOKENS}
        require_room((ANSWER, REPAIR), prompts, budget, count, **lengths)
        # The fields with descriptions, only their names, or "": the first that fits half of the question budget.
        wordings = (response_format.describe_fields(), response_format.describe_fields(short=True))
        limit = budget.question_tokens // 2
        outline = next((text for text in wordings if context.count_shown_tokens(text) <= limit), "")
    entry = {"name": response_format.name, "schema": response_format.schema, "outline": outline}
    log_settings = {**context.log_settings, _LOG_KEY: entry}
    return replace(
        context, prompts=prompts, response_format=response_format, outline=outline, log_settings=log_settings
    )


def load_format_for_resume(
    state: Mapping[str, Any], source: ResponseFormatSource | None, logged_settings: Mapping[str, Any], run_id: str
) -> ResponseFormat | None:
    """Return the response format of a run that is resumed.

    Args:
        state: the run's newest state.
        source: the response format that the caller passed, if any.
        logged_settings: the settings that the run was logged with.
        run_id: for errors.

    Raises:
        RunMismatchError: the run began without a schema or with another one, or its schema is unknown.
        ResponseFormatError, MissingExtraError: as `ResponseFormat.of`.
    """
    settings: str = state.get("settings") or ""
    fingerprint = settings.partition(f":{SCHEMA_PREFIX}")[2] or None
    response_format = None if source is None else ResponseFormat.of(source)
    if settings and response_format is not None and response_format.fingerprint != fingerprint:
        begun_with = f"the schema {fingerprint}" if fingerprint else "none"
        raise RunMismatchError(
            f"the run began with another response_format ({begun_with}; now the schema {response_format.fingerprint})",
            hint="Leave it out to continue with the run's own, or read the document again with this one.",
            run_id=run_id,
        )
    if response_format is not None or fingerprint is None:
        return response_format
    logged_format = logged_settings.get(_LOG_KEY)
    if isinstance(logged_format, dict):
        response_format = ResponseFormat.of({"type": "json_schema", "json_schema": logged_format})
    if response_format is None or response_format.fingerprint != fingerprint:
        raise RunMismatchError(
            "the run's answer is structured, and its schema is not in the run log",
            hint="Pass the same response_format again.",
            run_id=run_id,
        )
    return response_format


def _with_schema(prompts: Prompts) -> Prompts:
    """Return prompts that show the schema in the answer's template, and in templates that end like the answer's.

    A user's template stays unchanged; it shows the schema at {schema}.
    """
    packaged_texts = {read_template(f"answer_{answer_format.value}") for answer_format in AnswerFormat}
    answer = prompts.answer
    if answer.text in packaged_texts:
        answer = PromptTemplate(read_template("answer_json"), "answer_json.txt", ANSWER_FIELDS)
    other_templates = {name: _with_schema_ending(template) for name, template in prompts.others.items()}
    repair = complete_prompts((REPAIR,), prompts).others
    return replace(prompts, answer=answer, others={**other_templates, **repair})


def _with_schema_ending(template: PromptTemplate) -> PromptTemplate:
    """Return a template with the schema in place of the packaged answer instructions at its end, if it has them."""
    for instructions in map(read_answer_instructions, AnswerFormat):
        if template.text.endswith(instructions):
            text = template.text.removesuffix(instructions) + read_template("schema_form")
            return PromptTemplate(text, template.source, template.names | {"schema"})
    return template
