"""A report reads every document once, quotes its documents exactly, and checks its sentences."""

from __future__ import annotations

import asyncio
import csv
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.document_files import make_pdf
from support.fake_server import FakeServer
from support.programs import Program, kill_after, run_program
from support.report_documents import list_sections, read_keys, read_keys_and_write_report, write_report, write_topics
from support.scripts import extract, make_document

from memagent_graph import (
    Budget,
    Document,
    DocumentError,
    EventKind,
    MemAgent,
    MemAgentError,
    PolicyError,
    PromptTemplate,
    RunError,
    RunLog,
    ScriptedPolicy,
    load_prompts,
)
from memagent_graph.policies.profile import Profile
from memagent_graph.storage.file_locks import lease
from memagent_report import Report, areport, report, report_writing
from memagent_report.evidence_matrix import CellState, DifferingAnswers, ReportMode
from memagent_report.sentence_checks import ProblemKind

MakeReader = Callable[..., MemAgent]
BUDGET = Budget(context_window=4000, question_tokens=100, memory_tokens=200, chunk_tokens=1200, answer_tokens=600)
QUESTION = "What is said about conditions and exceptions?"
KEY_QUESTION = "What is the key of harbor?"
KEYS = (("a", "4711"), ("b", "12"), ("e", "5"))
PLANNED_QUESTIONS = ["What is said about if?", "What is said about not?"]


@pytest.fixture
def make_agent(make_reader: Any, tmp_path: Path) -> MakeReader:
    """Make readers with budgets for reports that share checkpoints and log."""
    defaults = {"budget": BUDGET, "checkpoints": tmp_path / "checkpoints.sqlite", "run_log": tmp_path / "runs.sqlite"}
    return lambda policy, **options: make_reader(policy, **{**defaults, **options})


def write_keys(folder: Path, **keys_by_name: str) -> list[Path]:
    """Write documents that each state a key of harbor in prose, or none if it is empty; return their paths."""
    paths = []
    for name, key in keys_by_name.items():
        paths.append(folder / f"{name}.txt")
        sentence = f"Every night it rained. The key of harbor is {key}. Nobody came."
        text = make_document({0.5: sentence} if key else {}, words=600).replace("word", f"{name}word")
        paths[-1].write_text(text)
    return paths


def test_report_on_ten_real_documents_quotes_them_exactly(make_agent, tmp_path) -> None:
    paths, policy = write_topics(tmp_path / "files"), ScriptedPolicy(write_report)
    agent = make_agent(policy)
    result = report(agent, QUESTION, paths)
    texts = [path.read_text("utf-8") for path in paths]
    assert result.mode is ReportMode.WRITTEN
    assert list(result.matrix.questions) == PLANNED_QUESTIONS  # planned by the policy
    assert [document.name for document in result.matrix.documents] == [path.name for path in paths]
    quotes = list(result.matrix.quotes())
    assert len(quotes) >= 8
    for position, quote in quotes:
        assert texts[position.document][quote.start_char : quote.end_char] == quote.text
        answer = result.matrix.cell(position.document, position.question).answer
        assert answer is not None
    assert (result.quotes_checked, result.quotes_found) == (len(quotes), len(quotes))
    assert [section.heading for section in result.sections] == ["On conditions", "On exceptions"]
    for section in result.sections:
        *copied_sentences, invented_sentence = section.sentences
        assert copied_sentences
        assert all(sentence.is_quoted for sentence in copied_sentences)
        assert {ProblemKind.NUMBER, ProblemKind.NAME} <= {problem.kind for problem in invented_sentence.problems}
    assert [reference.number for reference in result.references] == list(range(1, len(result.references) + 1))
    reads_by_section = Counter(list_sections(policy.prompts))
    assert set(reads_by_section.values()) == {1}


def test_report_resumes_after_a_failure_and_reads_only_new_documents(make_agent, tmp_path) -> None:
    failures = [PolicyError("the server is gone")]
    paths = write_topics(tmp_path / "files")

    def fail_once(prompt: str) -> Any:
        return failures.pop() if failures and policy.prompts[8:] else write_report(prompt)

    policy = ScriptedPolicy(fail_once)
    agent = make_agent(policy)
    with pytest.raises(PolicyError, match="the server is gone"):
        report(agent, QUESTION, paths[:4], questions=PLANNED_QUESTIONS)
    first_report = report(agent, QUESTION, paths[:4], questions=PLANNED_QUESTIONS)
    assert {cell.state for cell in first_report.matrix.cells} <= {CellState.ANSWERED, CellState.EMPTY}
    reads_by_section = Counter(list_sections(policy.prompts))
    assert sum(reads_by_section.values()) - len(reads_by_section) <= 8, "one for each read that was under way"
    calls_before = len(policy.prompts)
    assert report(agent, QUESTION, paths[:4], questions=PLANNED_QUESTIONS) == first_report
    assert len(policy.prompts) == calls_before
    longer_report = report(agent, QUESTION, paths[:5], questions=PLANNED_QUESTIONS)
    assert longer_report.report_id != first_report.report_id
    assert longer_report.matrix.cells[:8] == first_report.matrix.cells
    new_sections = {section for _, section in list_sections(policy.prompts[calls_before:])}
    assert new_sections
    assert all(" ".join(section.split()) in " ".join(paths[4].read_text().split()) for section in new_sections)


def test_calls_of_a_report_are_logged_as_runs(make_agent, tmp_path) -> None:
    agent = make_agent(ScriptedPolicy(write_report))
    result = report(agent, QUESTION, write_topics(tmp_path / "files")[:3], judge=True)
    log = RunLog(tmp_path / "runs.sqlite")
    runs = {run.run_id: run for run in log.runs()}
    cells = {cell.run_id: cell for cell in result.matrix.cells}
    assert set(runs) == {*cells, f"{result.report_id}-plan", f"{result.report_id}-writing"}
    for run_id, cell in cells.items():
        assert runs[str(run_id)].question == result.matrix.questions[cell.question]
    steps = log.trace(f"{result.report_id}-writing").calls
    assert {step.role for step in steps} <= {"report_outline", "report_section", "report_judge"}
    assert sum(step.role == "report_section" for step in steps) == 2
    assert log.get(f"{result.report_id}-plan").answer == "\n".join(PLANNED_QUESTIONS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"budget": None, "prompts": None, "profile": Profile(BUDGET, load_prompts())}, "the policy has no prompt for"),
        ({"budget": Budget(340, 30, 40, 80, 60)}, "the context window of 340 tokens is too small for"),
    ],
)
def test_policy_without_report_prompts_or_room_gives_an_extractive_report(
    make_agent, tmp_path, options, reason
) -> None:
    policy = ScriptedPolicy(read_keys)
    agent, paths = make_agent(policy, **options), write_keys(tmp_path, a="4711", b="12")
    result = report(agent, KEY_QUESTION, paths, judge=True)
    assert (result.mode, result.contradictions) == (ReportMode.EXTRACTIVE, ())
    kinds = [event.kind for event in result.events]
    assert kinds == [EventKind.NOT_PLANNED, EventKind.EXTRACTIVE, EventKind.NOT_JUDGED]
    assert f"{reason} report_outline, report_section" in result.events[1].detail
    (section,) = result.sections
    assert section.heading == "What is the key of harbor?"
    assert [(sentence.document, sentence.text, sentence.is_quoted) for sentence in section.sentences] == [
        (0, "4711", True), (1, "12", True)
    ]  # fmt: skip
    assert [quote.text for _, quote in result.matrix.quotes()] == [
        "The key of harbor is 4711.", "The key of harbor is 12."
    ]  # fmt: skip
    assert not [prompt for prompt in policy.prompts if "<quotes>" in prompt or "<answers>" in prompt]


def test_profile_with_templates_for_the_report_roles_gives_a_written_report(make_agent, tmp_path) -> None:
    last_words = {"report_questions": "Questions:", "report_outline": "Headings:", "report_section": "Sentences:"}
    templates = {
        name: PromptTemplate(
            "My own <quotes>{chunk}</quotes> <q>{prompt}</q>"
            + ("<h>{heading}</h>" if name == "report_section" else "")
            + f" {last_word}",
            name,
            frozenset({"chunk", "prompt", "heading"}),
        )
        for name, last_word in last_words.items()
    }
    policy = ScriptedPolicy(write_report)
    profile = Profile(BUDGET, replace(load_prompts(), others=templates))
    agent = make_agent(policy, budget=None, prompts=None, profile=profile)
    result = report(agent, QUESTION, write_topics(tmp_path / "files")[:3])
    assert (result.mode, list(result.matrix.questions)) == (ReportMode.WRITTEN, PLANNED_QUESTIONS)
    assert sum(prompt.startswith("My own") for prompt in policy.prompts) >= 3


def test_replies_with_invalid_unicode_do_not_stop_a_report(make_agent, tmp_path) -> None:
    def reply(prompt: str) -> str:
        if "<section>" in prompt or "<quotes>" in prompt or "<answers>" in prompt:
            return read_keys_and_write_report(prompt)
        return "\\boxed{4711 \ud800}"

    agent, paths = make_agent(ScriptedPolicy(reply), budget=Budget()), write_keys(tmp_path, a="4711")
    result = report(agent, "Keys?", paths, questions=[KEY_QUESTION])
    assert (result.mode, result.events) == (ReportMode.WRITTEN, ()), "the paper's budget has room for its roles"
    assert result.matrix.cell(0, 0).answer == "4711 ?"
    assert result.to_html().encode()


def test_malformed_replies_fall_back_to_the_question_and_the_answers(make_agent, tmp_path) -> None:
    def reply(prompt: str) -> str:
        if prompt.rstrip().endswith(("Questions:", "Headings:", "Sentences:")):
            return "..."
        return read_keys(prompt)

    result = report(make_agent(ScriptedPolicy(reply)), KEY_QUESTION, write_keys(tmp_path, a="4711"))
    assert result.matrix.questions == ("What is the key of harbor?",)
    assert [sentence.text for sentence in result.sentences] == ["4711"]
    assert {EventKind.NOT_PLANNED, EventKind.MALFORMED} <= {event.kind for event in result.events}


def test_wrong_quotes_of_a_sentence_are_replaced_by_supporting_quotes_of_its_section(make_agent, tmp_path) -> None:
    def reply(prompt: str) -> str:
        if prompt.rstrip().endswith("Sentences:"):
            return "The key of harbor is 12. [q1] [99]\nThe key of harbor is 4711.\nThe key of harbor is 5. [q1, q2]"
        if prompt.rstrip().endswith("Headings:"):
            return f"Keys [1] [{'7' * 5000}]"
        return read_keys(prompt)

    paths = write_keys(tmp_path, a="4711", b="12")
    agent = make_agent(ScriptedPolicy(reply), budget=Budget(context_window=30_000, answer_tokens=9_000))
    first, second, third = report(agent, "Keys?", paths, questions=[KEY_QUESTION]).sentences
    assert [first.text, second.text] == ["The key of harbor is 12.", "The key of harbor is 4711."]
    assert first.is_quoted
    assert report_writing.parse_section("So. [q1000000007, q3]", load_prompts()).value == [("So.", [3])]
    assert first.chosen_by_code
    assert {position.document for position in second.quotes} == {0}
    assert [problem.kind for problem in third.problems] == [ProblemKind.NUMBER]


def test_policy_judges_each_pair_of_different_answers_on_request(make_agent, tmp_path) -> None:
    judged_pairs = []

    def reply(prompt: str) -> str:
        if prompt.rstrip().endswith("COMPATIBLE:"):
            judged_pairs.append(extract(prompt, "answers"))
            return "CONTRADICT" if "b.txt" in judged_pairs[-1] else "COMPATIBLE"
        return read_keys_and_write_report(prompt)

    agent = make_agent(ScriptedPolicy(reply))
    paths = write_keys(tmp_path, a="4711", b="12", c="4711", d="", e="5")
    report_without_judging = report(agent, "Keys?", paths, questions=[KEY_QUESTION])
    assert (report_without_judging.contradictions, judged_pairs) == ((), [])
    judged_report = report(agent, "Keys?", paths, questions=[KEY_QUESTION], judge=True)
    lines = [f'{name}.txt: {key} (quote: "The key of harbor is {key}.")' for name, key in KEYS]
    assert sorted(judged_pairs) == ["\n".join(pair) for pair in combinations(lines, 2)]
    assert judged_report.contradictions == (DifferingAnswers(0, ((0, 2), (1,))), DifferingAnswers(0, ((1,), (4,))))
    assert judged_report.matrix.cell(3, 0).state is CellState.EMPTY
    assert "(empty)" in judged_report.to_markdown()
    for text in (judged_report.to_markdown(), judged_report.to_html()):
        assert "a.txt, c.txt: 4711" in text


def test_pairs_beyond_the_limit_are_counted_and_not_judged(make_agent, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report_writing, "_MAX_PAIRS", 2)
    agent, paths = make_agent(ScriptedPolicy(read_keys_and_write_report)), write_keys(tmp_path, a="4711", b="12", c="5")
    result = report(agent, "Keys?", paths, questions=[KEY_QUESTION], judge=True, extractive=True)
    assert [(event.kind, event.detail[:14]) for event in result.events] == [(EventKind.NOT_JUDGED, "1 further pair")]


@pytest.mark.parametrize("strategy", ["overwrite", "full_context"])
def test_quotes_have_page_numbers_and_may_be_chinese_with_every_strategy(make_agent, tmp_path, strategy) -> None:
    def reply(prompt: str) -> str:
        if "张三" in prompt:
            return "灯塔由张三建造" if "<section>" in prompt or "<text>" in prompt else "\\boxed{张三}"
        return "\\boxed{4711}" if "<text>" in prompt else read_keys(prompt)

    (paths := [tmp_path / "a.pdf", tmp_path / "b.txt"])[1].write_text("昨天下雨。灯塔由张三建造。今天也下雨。", "utf-8")
    paths[0].write_bytes(make_pdf("It rained. Nobody came.", "It snowed. The key of harbor is 4711. Then it rained."))
    result = report(make_agent(ScriptedPolicy(reply), strategy=strategy), KEY_QUESTION, paths, extractive=True)
    quotes = [(quote.text, quote.page) for _, quote in result.matrix.quotes()]
    assert quotes == [("The key of harbor is 4711.", "page 2"), ("灯塔由张三建造。", None)]
    assert all(sentence.is_quoted for sentence in result.sentences)
    assert "page 2" in result.to_markdown()


def test_unreadable_document_is_a_row_of_failed_cells(make_agent, tmp_path) -> None:
    readable_paths = write_keys(tmp_path, a="4711")
    (paths := [*readable_paths, tmp_path / "missing.txt", tmp_path / "empty.txt"])[2].write_text("  \n")
    agent = make_agent(ScriptedPolicy(read_keys))
    result = report(agent, KEY_QUESTION, paths, extractive=True)
    states = [cell.state for cell in result.matrix.cells]
    assert states == [CellState.ANSWERED, CellState.FAILED, CellState.FAILED]
    assert "missing.txt does not exist" in str(result.matrix.cells[1].error)
    assert str(tmp_path) not in result.to_markdown()
    with pytest.raises(DocumentError, match="does not exist"):
        report(agent, KEY_QUESTION, paths[1:])


def test_equal_texts_are_read_once_and_equal_names_are_numbered(make_agent, tmp_path) -> None:
    policy, text = ScriptedPolicy(read_keys), make_document({0.5: "The key of harbor is 4711."}, words=300)
    documents = [Document.from_text(text, "a"), Document.from_text(text, "a"), Document.from_text("Rain.", "a")]
    result = report(make_agent(policy), KEY_QUESTION, documents, extractive=True)
    assert [document.name for document in result.matrix.documents] == ["a", "a (2)", "a (3)"]
    assert [cell.answer for cell in result.matrix.cells] == ["4711", "4711", None]
    assert set(Counter(list_sections(policy.prompts)).values()) == {1}


def test_bad_requests_are_refused_before_anything_is_read(make_agent, tmp_path) -> None:
    policy, paths = ScriptedPolicy(read_keys), write_keys(tmp_path, a="4711")
    agent = make_agent(policy)
    for question, documents, options, message in (
        (" ", paths, {}, "the question is empty"),
        ("Keys?", [], {}, "there are no documents"),
        ("Keys?", paths, {"questions": ["Keys?", ""]}, "the question is empty"),
        ("Keys?", paths, {"questions": ["key " * 500]}, "its budget is 100"),
    ):
        with pytest.raises(MemAgentError, match=message):
            report(agent, question, documents, **options)  # type: ignore[arg-type]
    assert policy.prompts == []


def test_report_that_another_process_writes_is_refused(make_agent, tmp_path) -> None:
    agent, paths = make_agent(ScriptedPolicy(read_keys)), write_keys(tmp_path, a="4711")
    first_report = report(agent, KEY_QUESTION, paths, extractive=True)
    path = tmp_path / "checkpoints.sqlite-reading"
    with lease(path, first_report.report_id), pytest.raises(RunError, match="already"):
        report(agent, KEY_QUESTION, paths, extractive=True)


async def test_concurrent_reports_share_their_common_reads(make_agent, tmp_path) -> None:
    policy = ScriptedPolicy(read_keys, delay=0.002)
    paths = write_keys(tmp_path, a="4711", b="12", c="5")
    questions = [KEY_QUESTION, "What is the key of castle?"]
    agent = make_agent(policy, budget=Budget(900, 50, 60, 100, 60))
    reports = await asyncio.gather(
        areport(agent, "First?", paths, questions=questions, extractive=True),
        areport(agent, "Second?", paths[::-1], questions=questions[::-1], extractive=True),
    )
    assert [cell.answer for cell in reports[0].matrix.column(0)] == ["4711", "12", "5"]
    assert [cell.answer for cell in reports[1].matrix.column(1)] == ["5", "12", "4711"]
    assert set(Counter(list_sections(policy.prompts)).values()) == {1}


async def test_report_inside_another_graph_has_no_checkpoints_in_it(make_agent, tmp_path) -> None:
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import END, START, StateGraph

    paths, agent = write_keys(tmp_path, a="4711"), make_agent(ScriptedPolicy(read_keys), checkpoints=None)

    async def write_report(state: dict[str, Any]) -> dict[str, Any]:
        return {"report": (await areport(agent, KEY_QUESTION, paths, extractive=True)).to_dict()}

    builder: Any = StateGraph(dict)
    builder.add_node("report", write_report)
    builder.add_edge(START, "report")
    builder.add_edge("report", END)
    saver = InMemorySaver()
    state = await builder.compile(checkpointer=saver).ainvoke({}, {"configurable": {"thread_id": "outer"}})
    checkpoint_configs = [checkpoint.config["configurable"] for checkpoint in saver.list(None)]
    assert {(config["thread_id"], config["checkpoint_ns"]) for config in checkpoint_configs} == {("outer", "")}
    assert [cell.answer for cell in Report.from_dict(state["report"]).matrix.cells] == ["4711"]


def test_report_killed_at_random_moments_reads_no_document_twice(
    tmp_path: Path, size: Callable[[int, int], int], record_property: Callable[[str, Any], None]
) -> None:
    kill_count, document_count = size(2, 30), size(4, 40)
    for number in range(document_count):
        facts = {0.3: f"The key of harbor is {1000 + number}.", 0.8: f"The key of castle is {2000 + number}."}
        text = make_document(facts, words=400).replace("word", f"word{number:02}n")  # no two documents share a chunk
        (tmp_path / f"{number:02}.txt").write_text(text)
    random_source = random.Random(7)

    with FakeServer(lambda body, _: read_keys_and_write_report(body["messages"][0]["content"]), delay=0.03) as server:
        questions = ("-q", KEY_QUESTION, "-q", "What is the key of castle?")
        options = ("--base-url", server.base_url, "--tokenizer", "embedded", "--context-window", "1500",
                   "--question-tokens", "60", "--memory-tokens", "60", "--chunk-tokens", "100",
                   "--answer-tokens", "200", "--format", "csv", "--out", tmp_path / "out")  # fmt: skip
        paths = sorted(tmp_path.glob("*.txt"))
        command = [sys.executable, "-m", "memagent_graph", "report", "Keys?", *paths, *questions, *options]
        for _ in range(kill_count):
            with Program(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                assert kill_after(process, server.requests, len(server.requests) + random_source.randrange(2, 30))
        run_program(command, capture_output=True, check=True)
        prompts = [body["messages"][0]["content"] for body in server.requests]
    rows = csv.DictReader((tmp_path / "out" / "matrix.csv").read_text("utf-8-sig").splitlines())
    answers = [row["answer"] for row in rows]
    assert answers == [key for number in range(document_count) for key in (f"{1000 + number}", f"{2000 + number}")]
    calls_by_section = Counter((extract(prompt, "problem"), prompt) for prompt in prompts if "<section>" in prompt)
    repeated_count = sum(calls_by_section.values()) - len(calls_by_section)
    # A kill may lose the current chunk of both questions on each of the eight documents in flight.
    assert repeated_count <= kill_count * 2 * 8
    answer_calls = Counter(prompt for prompt in prompts if "<section>" not in prompt and "<memory>" in prompt)
    assert max(answer_calls.values()) <= 1 + kill_count
    record_property("sections asked again per kill", round(repeated_count / kill_count, 2))
