"""Reads with a `response_format`: prompts, and how replies are checked, repaired, logged and resumed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel
from support.fake_server import FakeServer
from support.scripts import extract, make_document, read_perfectly
from support.strategies import ALL_STRATEGIES, answer_perfectly, short_name
from typing_extensions import TypedDict
from unit.test_node import build_parent

from langchain_memagent.node import memagent_node
from langchain_memagent.read_long_document import ReadLongDocument
from memagent_graph import (
    Budget,
    Completion,
    EventKind,
    FinishReason,
    Limits,
    OpenAICompatiblePolicy,
    ScriptedPolicy,
    StopReason,
    load_prompts,
    load_tokenizer,
)
from memagent_graph.budget import CHAT_TEMPLATE_TOKENS
from memagent_graph.errors import (
    BudgetError,
    MemAgentError,
    ResponseFormatError,
    RunMismatchError,
)
from memagent_graph.settings import ReadSettings

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=600)
QUESTION = "What is the key of harbor?"
BUDGET = Budget(context_window=2000, question_tokens=200, memory_tokens=60, chunk_tokens=100, answer_tokens=60)
OTHER_SCHEMA = {"type": "object", "properties": {"castle": {"type": "integer"}}}


class Key(BaseModel):
    place: str
    key: int


def make_script(*answers: str | Completion) -> Any:
    """Return a script that reads perfectly, and replies to prompts with a schema with these answers in order."""
    replies = list(answers)

    def script(prompt: str) -> str | Completion:
        return replies.pop(0) if "<schema>" in prompt else read_perfectly(prompt)

    return script


ANSWER = '{"place": "harbor", "key": 4711}'


@pytest.fixture
def structured_reader(make_reader):
    def make(*answers: str | Completion, **options: Any) -> Any:
        return make_reader(ScriptedPolicy(make_script(*answers)), **{"budget": BUDGET, **options})

    return make


def test_with_a_pydantic_model_the_value_is_an_instance_and_the_answer_its_json(structured_reader) -> None:
    reader = structured_reader(f"The answer:\n```json\n{ANSWER}\n```")
    result = reader.read(TEXT, QUESTION, response_format=Key)
    assert result.value == Key(place="harbor", key=4711)
    assert result.answer == ANSWER
    assert result.stop_reason is StopReason.ANSWERED
    assert not result.events
    values = json.loads(json.dumps(result.to_dict()))
    assert values["value"] == {"place": "harbor", "key": 4711}
    assert values["response_format"] == Key.model_json_schema()


def test_answer_prompts_have_the_schema_and_update_prompts_the_fields(structured_reader) -> None:
    reader = structured_reader(ANSWER)
    reader.read(TEXT, QUESTION, response_format=Key)
    *updates, answer = reader.policy.prompts
    assert extract(answer, "schema") == json.dumps(Key.model_json_schema(), separators=(",", ":"))
    assert "boxed" not in answer
    assert all(extract(update, "problem").endswith("- place (string)\n- key (integer)") for update in updates)
    assert extract(answer, "problem") == QUESTION


def test_fields_over_the_question_budget_are_shortened_or_left_out(structured_reader) -> None:
    fields = {}
    for tokens in (200, 30, 16):
        reader = structured_reader(ANSWER, budget=Budget(2000, tokens, 60, 100, 60))
        reader.read(TEXT, QUESTION, response_format=Key)
        fields[tokens] = extract(reader.policy.prompts[0], "problem").removeprefix(QUESTION).strip()
    assert fields[200].count("\n") == 2
    assert fields[30] == "The answer will have these fields: place, key."
    assert fields[16] == ""


def test_an_invalid_reply_is_repaired_in_a_prompt_with_the_reply_and_the_error(structured_reader) -> None:
    reader = structured_reader('{"place": "harbor"}', ANSWER)
    result = reader.read(TEXT, QUESTION, response_format=Key)
    assert result.value == Key(place="harbor", key=4711)
    assert result.stop_reason is StopReason.ANSWERED
    assert [event.kind for event in result.events] == [EventKind.INVALID_ANSWER]
    assert "key: Field required" in result.events[0].detail
    repair = reader.policy.prompts[-1]
    assert extract(repair, "reply") == '{"place": "harbor"}'
    assert "key: Field required" in extract(repair, "error")
    assert extract(repair, "memory") == result.memory


def test_an_answer_that_stays_invalid_is_kept_and_the_stop_reason_reports_it(structured_reader) -> None:
    reader = structured_reader("I think it is 4711.", "It is 4711!", "4711, as I said.", run_log=True, checkpoints=None)
    result = reader.read(TEXT, QUESTION, response_format=Key)
    assert result.stop_reason is StopReason.INVALID_ANSWER
    assert not result.stop_reason.resumable
    assert (result.value, result.answer) == (None, "4711, as I said.")
    assert [event.kind for event in result.events] == [EventKind.INVALID_ANSWER] * 3
    assert "harbor 4711" in result.memory
    assert result.to_dict()["value"] is None
    record = reader.run_log.get(result.run_id)
    assert (record.stop_reason, record.answer) == ("invalid_answer", "4711, as I said.")


def test_an_empty_repair_keeps_the_reply_before_it(structured_reader) -> None:
    result = structured_reader('{"key": 4711}', *[""] * 6).read(TEXT, QUESTION, response_format=Key)
    assert (result.stop_reason, result.answer) == (StopReason.INVALID_ANSWER, '{"key": 4711}')


def test_an_answer_that_was_cut_off_is_repaired(structured_reader) -> None:
    truncated = Completion('{"place": "har', FinishReason.LENGTH, "scripted")
    result = structured_reader(truncated, ANSWER).read(TEXT, QUESTION, response_format=Key)
    assert result.value == Key(place="harbor", key=4711)
    assert [event.kind for event in result.events] == [EventKind.TRUNCATED, EventKind.INVALID_ANSWER]


def test_an_empty_or_refused_answer_is_not_an_answer(structured_reader) -> None:
    refusal = Completion("", FinishReason.REFUSED, "scripted")
    for answers in (["", "", ""], [refusal]):
        result = structured_reader(*answers).read(TEXT, QUESTION, response_format=Key)
        assert (result.stop_reason, result.value) == (StopReason.NO_ANSWER, None)


def test_several_questions_share_the_format(structured_reader) -> None:
    reader = structured_reader(*[ANSWER] * 2)
    results = reader.read(TEXT, questions=[QUESTION, "What is the key of castle?"], response_format=Key)
    assert [result.value for result in results] == [Key(place="harbor", key=4711)] * 2
    (result,) = structured_reader(ANSWER).batch([(TEXT, QUESTION)], response_format=Key)
    assert result.value == Key(place="harbor", key=4711)  # type: ignore[union-attr]


def test_answers_and_repairs_are_logged_as_conversations(structured_reader, log) -> None:
    reader = structured_reader("no", '{"place": "harbor"}', ANSWER, run_log=log)
    result = reader.read(TEXT, QUESTION, response_format=Key)
    rows = [conversation for conversation in log.conversations(result.run_id) if conversation.role != "update"]
    assert [(row.role, row.slot, row.writes.value) for row in rows] == [
        ("answer", 0, "answer"), ("repair", 0, "answer"), ("repair", 1, "answer"),
    ]  # fmt: skip
    assert [row.parents for row in rows[1:]] == [(rows[0].call_id,), (rows[1].call_id,)]
    assert all(row.sampling["json_schema"] is True for row in rows)
    assert [event.kind for row in rows for event in row.events] == ["invalid_answer"] * 2
    assert log.get(result.run_id).settings["response_format"]["schema"] == Key.model_json_schema()
    assert log.trace(result.run_id).final_memory == result.memory


class TestResuming:
    @pytest.fixture
    def stopped_run(self, structured_reader, tmp_path):
        """Returns a reader whose structured run stopped at a limit, and the id of the run."""

        def make(*answers: str, **options: Any) -> tuple[Any, str]:
            options = {"checkpoints": tmp_path / "c.sqlite", "run_log": tmp_path / "runs.sqlite", **options}
            reader = structured_reader(*answers, **options)
            result = reader.read(TEXT, QUESTION, response_format=Key, limits=Limits(max_chunks=3))
            assert result.stop_reason is StopReason.MAX_CHUNKS
            return reader, result.run_id

        return make

    def test_a_resume_takes_the_schema_from_the_log_or_caller_and_refuses_another(self, stopped_run) -> None:
        reader, run_id = stopped_run(ANSWER)
        with pytest.raises(RunMismatchError, match=r"another response_format .*Leave it out to continue"):
            reader.resume(run_id, response_format=OTHER_SCHEMA)
        with pytest.raises(MemAgentError, match="does not say how this run's reader was made"):
            ReadSettings.from_log(reader.run_log.get(run_id).settings, run_id)
        assert reader.resume(run_id).value == {"place": "harbor", "key": 4711}
        assert reader.resume(run_id, response_format=Key).value == Key(place="harbor", key=4711)  # the run has ended

    def test_a_resume_without_a_log_needs_the_schema_again(self, stopped_run) -> None:
        reader, run_id = stopped_run(ANSWER, run_log=False)
        with pytest.raises(RunMismatchError, match="Pass the same response_format again"):
            reader.resume(run_id)
        assert reader.resume(run_id, response_format=Key).value == Key(place="harbor", key=4711)

    def test_a_run_without_a_schema_is_not_resumed_with_one(self, structured_reader, tmp_path) -> None:
        reader = structured_reader(checkpoints=tmp_path / "c.sqlite")
        result = reader.read(TEXT, QUESTION, limits=Limits(max_chunks=3))
        with pytest.raises(RunMismatchError, match=r"\(none; now the schema"):
            reader.resume(result.run_id, response_format=Key)
        assert reader.resume(result.run_id).answer == "4711"

    async def test_a_run_killed_after_its_first_checkpoint_needs_the_schema_again(
        self, structured_reader, monkeypatch
    ) -> None:
        saver = InMemorySaver()
        reader, put = structured_reader(ANSWER, checkpoints=saver, run_log=False), saver.aput

        async def put_once(*arguments: Any) -> Any:
            if list(saver.list(None)):
                raise KeyError("simulated kill")
            return await put(*arguments)

        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(saver, "aput", put_once)
            await reader.aread(TEXT, QUESTION, response_format=Key, run_id="r")
        with pytest.raises(RunMismatchError, match="Pass the same response_format again"):
            await reader.aresume("r")
        assert (await reader.aresume("r", response_format=Key)).value == Key(place="harbor", key=4711)


def test_invalid_response_formats_are_refused_before_a_read(structured_reader) -> None:
    reader = structured_reader()
    with pytest.raises(ResponseFormatError, match="not a JSON schema"):
        reader.read(TEXT, QUESTION, response_format={"type": "objekt"})
    with pytest.raises(ResponseFormatError):
        reader.read(TEXT, questions=[QUESTION], response_format={"type": "objekt"})
    large_schema = {"type": "object", "properties": {f"field_number_{n}": {"type": "string"} for n in range(300)}}
    with pytest.raises(BudgetError, match=r"schema \d{4} .*fewer fields"):
        reader.read(TEXT, QUESTION, response_format=large_schema)
    assert not reader.policy.prompts


def test_a_custom_template_has_the_schema_in_its_field(structured_reader, tmp_path) -> None:
    template = tmp_path / "answer.txt"
    template.write_text("<q>{prompt}</q> <m>{memory}</m> <schema>{schema}</schema> JSON, please.")
    reader = structured_reader(ANSWER, "in words", prompts=load_prompts(answer_template=template))
    assert reader.read(TEXT, QUESTION, response_format=Key).value == Key(place="harbor", key=4711)
    assert reader.policy.prompts[-1].endswith("JSON, please.")
    assert '"place"' in extract(reader.policy.prompts[-1], "schema")
    reader.policy.script = lambda prompt: "\\boxed{7}" if "<m>" in prompt else read_perfectly(prompt)
    assert reader.read(TEXT, QUESTION).answer == "7"
    assert extract(reader.policy.prompts[-1], "schema") == ""


@pytest.mark.parametrize("name", ALL_STRATEGIES, ids=short_name)
def test_every_strategy_answers_in_the_format(structured_reader, name) -> None:
    def script(prompt: str) -> Completion:
        text = "4711" if "<schema>" in prompt else answer_perfectly(prompt)
        text = ANSWER if "<error>" in prompt else text
        return Completion(text, FinishReason.STOP, "scripted", token_ids=[1], logprobs=[-0.1])

    reader = structured_reader(strategy=name, budget=Budget(2400, 200, 120, 100, 60))
    reader.policy.script = script
    result = reader.read(TEXT, QUESTION, response_format=Key)
    assert result.value == Key(place="harbor", key=4711)
    assert [step.role for step in result.trace.answers][-1] == "repair"


def test_a_question_on_an_excerpt_has_the_schema_in_place_of_the_box(structured_reader) -> None:
    reader = structured_reader(ANSWER, strategy="full_context")
    result = reader.read(TEXT[:1200], QUESTION, response_format=Key)
    assert result.value == Key(place="harbor", key=4711)
    (prompt,) = reader.policy.prompts
    assert json.loads(extract(prompt, "schema")) == Key.model_json_schema()
    assert "boxed" not in prompt
    reader.read(TEXT[:1200], QUESTION)
    assert reader.policy.prompts[-1].endswith("\\boxed{}.")


def test_an_excerpt_leaves_room_for_the_schema(structured_reader) -> None:
    reader = structured_reader(ANSWER, strategy="middle_truncation")
    reader.read(make_document({}, words=2000), QUESTION, response_format=Key)
    (prompt,) = reader.policy.prompts
    tokens = load_tokenizer("embedded").count(prompt) + CHAT_TEMPLATE_TOKENS + BUDGET.answer_tokens
    assert BUDGET.context_window - 100 < tokens <= BUDGET.context_window


class TestGuidedDecoding:
    def make_reader_on(self, make_reader, server: FakeServer, **options: Any) -> Any:
        return make_reader(OpenAICompatiblePolicy(base_url=server.base_url, max_retries=0), budget=BUDGET, **options)

    def test_only_the_request_for_the_answer_asks_for_guided_decoding(self, make_reader) -> None:
        with FakeServer(lambda body, number: make_script(ANSWER)(body["messages"][-1]["content"])) as server:
            result = self.make_reader_on(make_reader, server).read(TEXT, QUESTION, response_format=Key)
        assert result.value == Key(place="harbor", key=4711)
        *updates, answer = server.requests
        assert answer["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "Key", "schema": Key.model_json_schema()},
        }
        assert not any("response_format" in update for update in updates)

    def test_a_server_that_refuses_the_schema_gets_it_only_once(self, make_reader) -> None:
        def respond(body: dict[str, Any], number: int) -> Any:
            if "response_format" in body:
                return web.json_response({"error": {"message": "response_format is not supported"}}, status=400)
            prompt = body["messages"][-1]["content"]
            if "<error>" in prompt:
                return ANSWER
            return "4711" if "<schema>" in prompt else read_perfectly(prompt)

        with FakeServer(respond) as server:
            reader = self.make_reader_on(make_reader, server)
            results = [reader.read(TEXT, QUESTION, response_format=Key) for _ in range(2)]
        assert [result.value for result in results] == [Key(place="harbor", key=4711)] * 2
        assert [event.kind for event in results[0].events] == [
            EventKind.SCHEMA_REFUSED, EventKind.INVALID_ANSWER, EventKind.SCHEMA_REFUSED,
        ]  # fmt: skip
        assert sum("response_format" in request for request in server.requests) == 1


class TestInGraphs:
    class State(TypedDict, total=False):
        question: str | list[str]
        document: str
        answer: Any
        key: Any

    def test_a_node_writes_the_value(self, structured_reader) -> None:
        node = memagent_node(structured_reader(ANSWER), response_format=Key, value="key")
        out = build_parent(node, self.State).compile().invoke({"question": QUESTION, "document": TEXT})
        assert (out["answer"], out["key"]) == (ANSWER, {"place": "harbor", "key": 4711})

    async def test_a_node_writes_the_values_of_several_questions(self, structured_reader) -> None:
        node = memagent_node(structured_reader(*[ANSWER] * 2), response_format=Key, value="key")
        app = build_parent(node, self.State).compile(checkpointer=InMemorySaver())
        request = {"question": [QUESTION, "And of castle?"], "document": TEXT}
        out = await app.ainvoke(request, {"configurable": {"thread_id": "1"}})
        assert out["key"] == [{"place": "harbor", "key": 4711}] * 2

    def test_the_readers_graph_answers_in_json(self, structured_reader) -> None:
        out = structured_reader(ANSWER).graph(response_format=Key).invoke({"question": QUESTION, "document": TEXT})
        assert json.loads(out["answer"]) == {"place": "harbor", "key": 4711}

    def test_the_tool_gives_json_to_the_model_and_the_value_in_the_artifact(self, structured_reader) -> None:
        tool = ReadLongDocument(agent=structured_reader(ANSWER, "no", "no", "no"), answer_schema=Key)
        for stop_reason, value in (("answered", {"place": "harbor", "key": 4711}), ("invalid_answer", None)):
            arguments = {"questions": [QUESTION], "text": TEXT}
            message = tool.invoke({"name": tool.name, "args": arguments, "id": "1", "type": "tool_call"})
            [reading] = message.artifact["readings"]
            assert (reading["stop_reason"], reading["value"]) == (stop_reason, value)
            assert f"Answer: {reading['answer']}" in message.text
        assert "does not have the form" in message.text
