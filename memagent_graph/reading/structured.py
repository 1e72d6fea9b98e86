"""Structured answers: the parts of a read that depend on a `response_format`, for every strategy.

The answer prompt shows the schema, the server is asked for guided decoding, and every reply is validated. A reply that
does not match the schema goes back to the policy with the error, in the role `repair`, at most `UpdateRules.retries`
times. If no reply matches, the last one is the answer, the run has no value, and it stops with `invalid_answer`. Memory
prompts name the answer's fields after the question, so that the memory keeps them.

A policy that understands only its own prompts keeps them: its decoding is guided and its replies are validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from memagent_graph.errors import RunMismatchError
from memagent_graph.prompts import ANSWER_FIELDS, AnswerFormat, Prompts, PromptTemplate, read_template
from memagent_graph.reading.state import SCHEMA_MARK, ReaderContext, Structure
from memagent_graph.roles import ANSWER, REPAIR, prompts_for, read_answer_form, require_room

if TYPE_CHECKING:
    from memagent_graph.response_format import ResponseFormat, ResponseFormatSource

ERROR_TOKENS: Final = 256
"""Maximum tokens of the error message in a repair prompt."""
_LOG_KEY: Final = "response_format"


def with_response_format(context: ReaderContext, source: ResponseFormatSource | None) -> ReaderContext:
    """Return the context of a read with a structured answer; with None, the context unchanged.

    Args:
        context: the context of a graph.
        source: what `ResponseFormat.of` takes.

    Raises:
        ResponseFormatError, MissingExtraError: as `ResponseFormat.of`.
        BudgetError: the schema does not fit the prompts of the answer.
    """
    if source is None:
        return context
    form = _load_form(source)
    prompts = replace(context.prompts, answer_format=AnswerFormat.PLAIN)
    outline = ""
    if not context.trained_prompts_only:
        prompts = _with_schema(prompts, context.prompts)
        budget, count = context.budget, context.tokenizer.count
        lengths = {"schema": count(prompts.neutralise(form.text)), "reply": budget.answer_tokens, "error": ERROR_TOKENS}
        require_room((ANSWER, REPAIR), prompts, budget, count, **lengths)
        outline = _describe_outline(form, context)
    logged = {**context.log_settings, _LOG_KEY: {"name": form.name, "schema": form.schema, "outline": outline}}
    return replace(context, prompts=prompts, structure=Structure(form, outline), log_settings=logged)


def format_for_resume(
    state: Mapping[str, Any], source: ResponseFormatSource | None, logged: Mapping[str, Any], run_id: str
) -> ResponseFormat | None:
    """Return the response format of a run that is resumed.

    Args:
        state: the run's newest state.
        source: the response format that the caller passed, if any.
        logged: the settings that the run was logged with.
        run_id: for errors.

    Raises:
        RunMismatchError: the run began without a schema or with another one, or its schema is unknown.
        ResponseFormatError, MissingExtraError: as `ResponseFormat.of`.
    """
    settings: str = state.get("settings") or ""
    fingerprint = settings.partition(f":{SCHEMA_MARK}")[2] or None
    form = None if source is None else _load_form(source)
    if settings and form is not None and form.fingerprint != fingerprint:
        then = f"the schema {fingerprint}" if fingerprint else "none"
        raise RunMismatchError(
            f"the run began with another response_format ({then}; now the schema {form.fingerprint})",
            hint="Leave it out to continue with the run's own, or read the document again with this one.",
            run_id=run_id,
        )
    if form is not None or fingerprint is None:
        return form
    logged_form = logged.get(_LOG_KEY)
    form = _load_form({"type": "json_schema", "json_schema": logged_form}) if isinstance(logged_form, dict) else None
    if form is None or form.fingerprint != fingerprint:
        raise RunMismatchError(
            "the run's answer is structured, and its schema is not in the run log",
            hint="Pass the same response_format again.",
            run_id=run_id,
        )
    return form


def _load_form(source: ResponseFormatSource) -> ResponseFormat:
    from memagent_graph.response_format import ResponseFormat  # noqa: PLC0415  only structured reads need it

    return ResponseFormat.of(source)


def _with_schema(prompts: Prompts, before: Prompts) -> Prompts:
    """Return prompts that show the schema in the answer, and in roles whose template ends like the answer's.

    A template of the user stays unchanged and shows the schema at {schema}.
    """
    packaged = {read_template(f"answer_{form.value}") for form in AnswerFormat}
    answer = before.answer
    if answer.text in packaged:
        answer = PromptTemplate(read_template("answer_json"), "answer_json.txt", ANSWER_FIELDS)
    others = {name: _with_schema_ending(template) for name, template in before.others.items()}
    repair = prompts_for((REPAIR,), before).others
    return replace(prompts, answer=answer, others={**others, **repair})


def _with_schema_ending(template: PromptTemplate) -> PromptTemplate:
    """Replace the packaged answer instructions at the end of a template by the schema, if it has them."""
    for form in map(read_answer_form, AnswerFormat):
        if template.text.endswith(form):
            text = template.text.removesuffix(form) + read_template("schema_form")
            return PromptTemplate(text, template.source, template.names | {"schema"})
    return template


def _describe_outline(form: ResponseFormat, context: ReaderContext) -> str:
    """Return the fields with descriptions, only their names, or nothing, to fit half of the question budget."""
    count, limit = context.tokenizer.count, context.budget.question_tokens // 2
    wordings = (form.describe_fields(), form.describe_fields(short=True))
    return next((text for text in wordings if count(context.prompts.neutralise(text)) <= limit), "")
