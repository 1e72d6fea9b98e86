"""`MemAgent`: the reader as one object. Documents and questions in, answers out; runs can be resumed and edited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias, overload

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import EmptyInputError
from typing_extensions import Unpack

from memagent_graph.concurrency.background import PerLoop, make_synchronous, make_synchronous_stream
from memagent_graph.concurrency.shared_pass import MAX_SHARED_READS, Barrier, read_in_passes
from memagent_graph.documents import Document, DocumentRef, DocumentStore, open_store
from memagent_graph.errors import (
    CheckpointError,
    DocumentMismatchError,
    MemAgentError,
    PolicyError,
    RunError,
    RunMismatchError,
    RunNotFoundError,
    require_minimum,
)
from memagent_graph.events import StopReason
from memagent_graph.policies.model_info import ModelInfo, SelfDescribing
from memagent_graph.policies.profile import find_profile_folder, require_profile
from memagent_graph.policy import Policy
from memagent_graph.policy_registry import convert_to_policy, make_policy
from memagent_graph.reading.assembly import ReaderParts, assemble
from memagent_graph.reading.execution import Execution
from memagent_graph.reading.graph import ReaderGraph, build_graph
from memagent_graph.reading.inputs import ReadOptions, check_options, check_question, check_questions, store_document
from memagent_graph.reading.run_history import (
    await_result,
    edit_memory,
    load_newest_snapshot,
    load_trace_so_far,
    make_result_from_state,
    make_thread_config,
    require_results,
)
from memagent_graph.reading.state import Limits, ReaderContext, new_run_id
from memagent_graph.reading.steps import StepContext
from memagent_graph.reading.structured import load_format_for_resume
from memagent_graph.response_format import ResponseFormatSource
from memagent_graph.results import AnswerSoFar, ReadResult
from memagent_graph.roles import ANSWER
from memagent_graph.run_log import RunLog
from memagent_graph.settings import PolicySettings, ReadSettings
from memagent_graph.storage.checkpoints import lease_run, open_checkpointer
from memagent_graph.storage.private_files import get_default_run_log_path
from memagent_graph.strategies import choose_strategy
from memagent_graph.tokenizers import load_tokenizer
from memagent_graph.trace import MemoryUpdate, Trace

_TRACING_KEYS: Final = ("callbacks", "tags", "metadata", "run_name")
"""The keys of a caller's config that a read uses, for tracing. Other keys belong to the caller's own run."""
DocumentSource: TypeAlias = Any
"""A source for `Document.of`: text, `pathlib.Path`, bytes, an open file, a stream of text, LangChain documents."""


class MemAgent(AbstractContextManager["MemAgent"], AbstractAsyncContextManager["MemAgent"]):
    """Reads documents of any length with a policy whose context is small (MemAgent, arXiv 2507.02259).

    Defaults come from the policy: tokenizer, context window, and the budget and prompts of its training. Methods to
    read, resume and edit exist twice: `aread` for asynchronous code, `read` for synchronous code.

    >>> MemAgent(policy, strategy="gated", chunk_tokens=2000, temperature=1.0)  # doctest: +SKIP
    >>> MemAgent("http://localhost:8000/v1")  # doctest: +SKIP
    >>> MemAgent(init_chat_model("openai:gpt-5-mini"), tokenizer="o200k_base")  # doctest: +SKIP

    Args:
        policy: the language model: a policy, a LangChain chat model, a client of the `openai` package (its settings are
            used), the name of a policy, or the address of a server. By default it is chosen by `model` or `base_url`,
            then OPENAI_BASE_URL, then a policy that was added to this machine (`memagent policy add`).
        settings: the settings of the reader, as on the command line.
        store: the store for texts of documents, by default in the user's data folder. The settings determine its
            options.
        checkpoints: saves the state at every step, so that runs can be resumed and edited: the path of a SQLite file,
            the URL of a PostgreSQL server (the extra "postgres"), or a LangGraph checkpointer. Without it, runs cannot
            be resumed.
        run_log: the log of runs: a log, the path of its file, True for the log in the user's data folder, or False for
            none. With a log, token ids and log-probs are requested if the policy can return them.
        **choices: fields of `ReadSettings` that replace fields of `settings`. `profile`, `tokenizer` and `strategy` may
            be names or objects. The groups `budget`, `sampling` and `rules` set several fields.

    Raises:
        MemAgentError: a setting is unknown, out of bounds or of another type, or belongs to a policy that was passed as
            an object.
        BudgetError: the budget does not fit the window (at the first read, if the policy reports the window).
        PolicyError: no policy is named and none was added, or the policy does not exist or cannot be loaded.
        ProfileError, PromptError: `profile` has no `memagent.json`, or it cannot be parsed.
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        settings: ReadSettings | None = None,
        store: DocumentStore | Path | str | None = None,
        checkpoints: BaseCheckpointSaver[Any] | Path | str | None = None,
        run_log: RunLog | Path | str | bool = True,
        **choices: Any,
    ) -> None:
        if policy is not None:
            choices["policy"] = policy
        settings = (settings or ReadSettings()).replace(**choices)
        if isinstance(settings.policy, str | None):
            settings = settings.resolve()
            own_policy = make_policy(settings)
        else:
            own_policy = convert_to_policy(settings.policy, settings)
        self._owns_policy, self._owns_log = True, not isinstance(run_log, RunLog)
        self._checkpoints = checkpoints
        profile, tokenizer = settings.profile, settings.tokenizer
        if tokenizer is None and isinstance(profile, str | Path):
            folder = find_profile_folder(profile)
            tokenizer = folder if (folder / "tokenizer.json").is_file() else None
        self._set_parts(
            ReaderParts(
                settings=settings,
                policy=own_policy,
                store=store if isinstance(store, DocumentStore) else open_store(store),
                profile=require_profile(profile) if isinstance(profile, str | Path) else profile,
                tokenizer=load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer,
                run_log=_open_log(run_log),
            )
        )

    def _set_parts(self, parts: ReaderParts) -> None:
        """Read with these parts. Nothing is opened, and the policy is not called yet."""
        self.policy, self.run_log = parts.policy, parts.run_log
        self.settings = settings = parts.settings
        """The settings of the reader."""
        check_options({"limits": settings.limits})
        self.store = parts.store.with_options(
            converter=settings.converter, replace_undecodable=settings.replace_undecodable
        )
        self._parts = parts = replace(parts, store=self.store)
        self.strategy = choose_strategy(parts.settings.strategy, parts.profile)
        self._graphs: PerLoop[list[ReaderGraph]] = PerLoop(list, self._close_graphs)
        self._prepare_lock: PerLoop[asyncio.Lock] = PerLoop(asyncio.Lock)
        self.reader_context: ReaderContext | None = None
        """The context of the nodes; None until `aprepare` has requested missing settings from the policy."""
        if parts.is_sufficient:
            context = assemble(parts, ModelInfo())
            self.reader_context = context if parts.is_complete else None

    # Reading

    @overload
    async def aread(self, document: DocumentSource, question: str, **options: Unpack[ReadOptions]) -> ReadResult: ...

    @overload
    async def aread(
        self,
        document: DocumentSource,
        *,
        questions: Iterable[str],
        max_concurrency: int = MAX_SHARED_READS,
        return_exceptions: Literal[False] = False,
        on_update: Callable[[str, MemoryUpdate], None] | None = None,
        **options: Unpack[ReadOptions],
    ) -> list[ReadResult]: ...

    @overload
    async def aread(
        self,
        document: DocumentSource,
        *,
        questions: Iterable[str],
        max_concurrency: int = MAX_SHARED_READS,
        return_exceptions: bool,
        on_update: Callable[[str, MemoryUpdate], None] | None = None,
        **options: Unpack[ReadOptions],
    ) -> list[ReadResult | Exception]: ...

    async def aread(
        self,
        document: DocumentSource,
        question: str | None = None,
        *,
        questions: Iterable[str] | None = None,
        max_concurrency: int = MAX_SHARED_READS,
        return_exceptions: bool = False,
        on_update: Callable[[str, MemoryUpdate], None] | None = None,
        **options: Unpack[ReadOptions],
    ) -> ReadResult | list[ReadResult] | list[ReadResult | Exception]:
        """Read a document for one question, or once for several questions.

        Several questions have separate memories, runs and log entries, and all of them read the same chunk at the same
        time. If the section is first in the prompt (`prompts.layout`), a server with a prefix cache computes it once
        for all questions.

        >>> agent.read(report, "Who signed it?").answer  # doctest: +SKIP
        >>> [result.answer for result in agent.read(report, questions=["Who signed it?", "When?"])]  # doctest: +SKIP

        Args:
            document: a source for `Document.of` (text, `pathlib.Path`, bytes, an open file, a stream of text, LangChain
                documents), or a reference from `store.add`.
            question: the question, at most `budget.question_tokens` tokens.
            questions: several questions, at least one. Equal questions share one run and its result.
            max_concurrency: the maximum number of `questions` in one pass. The other questions follow in later passes.
            return_exceptions: whether to return failures in the list instead of raising the first one.
            on_update: called with the question and each of its memory updates.
            options: see `memagent_graph.reading.inputs.ReadOptions`.

        Returns:
            The result, or with `questions` a list of results in the same order.

        Raises:
            MemAgentError, BudgetError: there is no question, or a question is empty or too long. Nothing was read.
            ResponseFormatError, MissingExtraError: `response_format` cannot be used. Nothing was read.
            DocumentError, PolicyError: the read failed. With `questions`, the error is raised after all reads have
                ended. With `checkpoints`, the run can be resumed.
        """
        if (question is None) == (questions is None):
            raise MemAgentError(
                "there is no question" if question is None else "both question and questions were given",
                hint='Pass one, read(document, "..."), or several, read(document, questions=["...", "..."]).',
            )
        if question is not None:
            if return_exceptions or on_update is not None:
                raise MemAgentError(
                    "return_exceptions and on_update are for several questions",
                    hint="Pass questions=[...], or use stream for the updates of one.",
                )
            return await await_result(self._start(document, question, options, yields_updates=False))
        require_minimum(1, max_concurrency=max_concurrency)
        run_id = options.get("run_id")
        context = (await self._make_graph()).with_response_format(options.get("response_format")).reader_context
        texts = check_questions(questions or (), context)
        check_options(options)
        reference = await store_document(document, self.store, pages=options.get("pages"))

        async def read_one(text: str, barrier: Barrier) -> ReadResult:
            own_options: ReadOptions = {
                **options,
                "run_id": None if run_id is None else f"{run_id}-{texts.index(text)}",
                "response_format": context.response_format,
                "pages": None,
                "barrier": barrier,
            }
            report = partial(on_update, text) if on_update else None
            return await await_result(self._start(reference, text, own_options, yields_updates=bool(report)), report)

        reads = {text: partial(read_one, text) for text in texts}
        outcomes = dict(zip(reads, await read_in_passes(list(reads.values()), max_concurrency), strict=True))
        results = [outcomes[text] for text in texts]
        return results if return_exceptions else require_results(results)

    read = make_synchronous(aread)

    def astream(
        self, document: DocumentSource, question: str, **options: Unpack[ReadOptions]
    ) -> AsyncGenerator[MemoryUpdate | ReadResult, None]:
        """Read, and yield memory updates as they happen, then the result. The arguments are those of `aread`."""
        return self._start(document, question, options)

    stream = make_synchronous_stream(astream)

    async def abatch(
        self,
        requests: Iterable[tuple[DocumentSource, str]],
        *,
        response_format: ResponseFormatSource | None = None,
        max_concurrency: int = 128,
        return_exceptions: bool = False,
    ) -> list[ReadResult | Exception]:
        """Read many pairs of document and question. For many questions on one document, see `aread`.

        Results are in the order of the requests. `response_format` applies to all answers. All reads run to their end;
        then the first failure is raised, or with `return_exceptions`, failures are returned in place of results.
        """
        requests = [*requests]
        if requests:
            require_minimum(1, max_concurrency=max_concurrency)
        slots = asyncio.Semaphore(max_concurrency)

        async def read_one(request: tuple[DocumentSource, str]) -> ReadResult:
            async with slots:
                return await self.aread(*request, response_format=response_format)

        outcomes: list[Any] = await asyncio.gather(*map(read_one, requests), return_exceptions=True)
        return outcomes if return_exceptions else [*require_results(outcomes)]

    batch = make_synchronous(abatch)

    # Resuming, and editing

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether this reader saves checkpoints itself."""
        return self._checkpoints is not None

    async def acheckpointer(self) -> BaseCheckpointSaver[Any] | None:
        """Return the checkpointer of the running loop, to share with copies. It is open until this reader is closed."""
        saver = (await self._make_graph()).checkpointer
        return saver if isinstance(saver, BaseCheckpointSaver) else None

    async def aresume(
        self,
        run_id: str,
        *,
        document: DocumentSource | None = None,
        response_format: ResponseFormatSource | None = None,
        limits: Limits | None = None,
    ) -> ReadResult:
        """Continue a run that was killed, failed, stopped at a limit, or edited. A finished run returns its result.

        Args:
            run_id: the run.
            document: the document of the run; needed only if the store no longer has its text.
            response_format: for a structured read, its original form. By default the schema comes from the run log, and
                the result's `value` has JSON values even if the form was a model.
            limits: limits of this read.

        Raises:
            RunNotFoundError: there is no such run in the checkpoints.
            RunMismatchError: the run has another document, tokenizer, chunk size, wording or `response_format`, or its
                `response_format` is unknown.
        """
        return await await_result(
            self.astream_resume(run_id, document=document, response_format=response_format, limits=limits)
        )

    resume = make_synchronous(aresume)

    async def astream_resume(
        self,
        run_id: str,
        *,
        document: DocumentSource | None = None,
        response_format: ResponseFormatSource | None = None,
        limits: Limits | None = None,
        past_limit: bool = True,
        barrier: Barrier | None = None,
    ) -> AsyncGenerator[MemoryUpdate | ReadResult, None]:
        """Resume a run, and yield memory updates as they happen and the result at the end.

        The arguments are those of `aresume`, and `barrier` of `ReadOptions`. Without `past_limit`, a run that stopped
        at a limit is not continued; its result is yielded.
        """
        with await lease_run((await self._make_graph()).checkpointer, run_id):
            graph, state = await self._continue(run_id, document, response_format)
            trace = await load_trace_so_far(graph, run_id)
            stop_reason = state.get("stop_reason")
            if stop_reason and not (past_limit and StopReason(stop_reason).resumable):
                yield make_result_from_state(graph, state, trace)
                return
            if stop_reason:
                node = graph.strategy.continues_after
                await graph.aupdate_state(make_thread_config(run_id), {"stop_reason": None}, as_node=node)
            options: ReadOptions = {"limits": limits, "barrier": barrier}
            async with aclosing(self._run(graph, None, state, trace, options)) as items:
                async for item in items:
                    yield item

    async def aresume_or_read(
        self,
        run_id: str,
        document: DocumentSource | Callable[[], Awaitable[DocumentRef]],
        question: str,
        *,
        may_resume: bool = True,
        past_limit: bool = True,
        on_update: Callable[[MemoryUpdate], None] | None = None,
        **options: Any,
    ) -> ReadResult:
        """Continue the run with this id, or read the document if there is none that this reader can continue.

        `document` may be a function that returns a reference; it is called only if the document is read. Without
        `may_resume`, the document is always read. The other arguments are those of `astream_resume`.
        """
        if may_resume and self.keeps_checkpoints:
            with suppress(RunNotFoundError, RunMismatchError):
                return await await_result(self.astream_resume(run_id, past_limit=past_limit, **options), on_update)
        reference = await document() if callable(document) else document
        return await await_result(self.astream(reference, question, run_id=run_id, **options), on_update)

    async def ahistory(self, run_id: str) -> list[MemoryUpdate]:
        """Return the memory updates so far, in order. After an edit, updates that it discarded are not included.

        Raises:
            RunNotFoundError: there is no such run in the checkpoints.
        """
        graph = await self._make_graph()
        await load_newest_snapshot(graph, run_id)
        return list((await load_trace_so_far(graph, run_id)).updates)

    history = make_synchronous(ahistory)

    async def aanswer_so_far(self, run_id: str, question: str | None = None) -> AnswerSoFar:
        """Answer once from the current memory of a run, which does not change and may be running.

        Args:
            run_id: the run.
            question: a question in place of the run's, at most `budget.question_tokens` tokens.

        Raises:
            RunNotFoundError: there is no such run in the checkpoints.
            PolicyError: the policy could not be called.
        """
        graph = await self._make_graph()
        context, state = graph.reader_context, (await load_newest_snapshot(graph, run_id)).values
        question = question or state["question"]
        check_question(question, context)
        memory = graph.strategy.compute_current_memory(state, context)
        context = replace(context, sampling=replace(context.sampling, logprobs=False))
        step = StepContext({**state, "question": question}, context, Execution(context))  # without a log
        try:
            reply = await step.ask(ANSWER, parents=(), memory=memory)
        finally:
            step.processor_turn.end()
        return AnswerSoFar(reply.value or reply.text, memory, reply.call.usage)

    answer_so_far = make_synchronous(aanswer_so_far)

    async def aedit_memory(
        self, run_id: str, chunk: int, text: str, *, branch: str | None = None, author: str | None = None
    ) -> None:
        """Replace the memory after `chunk` (counted from 0). `resume` continues from there.

        Args:
            run_id: the run.
            chunk: the index of the chunk.
            text: the new memory.
            branch: the branch that read the chunk ("" is the trunk), by default the last branch that read it.
            author: the person who edits, for the trace and the log.

        Raises:
            RunNotFoundError: there is no such run in the checkpoints.
            RunMismatchError: the run began with another strategy, tokenizer, chunk size or wording.
            RunHeldError: the run is being read.
            RunError: the run has not read that chunk, or the text is longer than the memory budget.
        """
        graph, state = await self._continue(run_id)
        with await lease_run(graph.checkpointer, run_id):
            call = await edit_memory(graph, run_id, chunk, text, branch, author)
        if self.run_log is not None:
            remaining_ids = {call.id for call in (await load_trace_so_far(graph, run_id)).calls}
            context = graph.reader_context  # the run may have begun in the log of another machine
            run_values = run_id, state["question"], state["document"], context.log_settings
            self.run_log.begin(*run_values, context.strategy, context.strategy_fingerprint)
            entry = self.run_log.edit(run_id, chunk, text, call_id=call.id, author=author, remaining=remaining_ids)
            await asyncio.to_thread(self.run_log.wait, entry)

    edit_memory = make_synchronous(aedit_memory)

    # Other readers, and the graph

    def copy(
        self,
        *,
        policy: Policy | None = None,
        checkpoints: BaseCheckpointSaver[Any] | Path | str | None = None,
        run_log: RunLog | bool | None = None,
        **choices: Any,
    ) -> MemAgent:
        """Return a copy of this reader with the same policy and store, and with other settings.

        `choices` are those of `MemAgent`, except for the policy, its server and its tokenizer. Checkpoints may be
        shared. A different `policy` must have the same model. A copy closes only a policy of its own.

        Raises:
            MemAgentError: a choice is of the policy, which the copy keeps.
        """
        if kept := sorted({*choices} & {"profile", *PolicySettings.__dataclass_fields__}):
            raise MemAgentError(
                f"a copy has the policy of its original, so {kept[0]} cannot be changed", hint="Make another MemAgent."
            )
        reader = self.__copy__()
        reader._owns_policy, reader._owns_log = policy is not None, not isinstance(run_log, RunLog | None)
        reader._checkpoints = self._checkpoints if checkpoints is None else checkpoints
        reader._set_parts(
            replace(
                self._parts,
                settings=self.settings.replace(**choices),
                policy=self.policy if policy is None else policy,
                tokenizer=self.reader_context.tokenizer if self.reader_context else self._parts.tokenizer,
                run_log=self.run_log if run_log is None else _open_log(run_log),
            )
        )
        return reader

    def __copy__(self) -> MemAgent:
        reader = object.__new__(type(self))
        reader.__dict__.update(self.__dict__)
        return reader

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a MemAgent cannot be pickled: it has connections, threads and open files, and may have a key. "
            "Create it in the process that uses it; a process that is forked from this one can use it as it is."
        )

    async def aprepare(self) -> ReaderContext:
        """Request missing settings from the policy, check that the budget fits, and return the context of the nodes.

        Raises:
            PolicyError, TokenizerError, BudgetError: the errors that the first read would raise.
        """
        async with self._prepare_lock.get():
            if self.reader_context is None:
                info = ModelInfo()
                if isinstance(self.policy, SelfDescribing):
                    try:
                        info = await self.policy.describe()
                    except PolicyError:
                        if not self._parts.is_sufficient:
                            raise
                self.strategy = choose_strategy(self.settings.strategy, self._parts.profile or info.profile)
                self.reader_context = await asyncio.to_thread(assemble, self._parts, info)
        return self.reader_context

    async def agraph(self, *, response_format: ResponseFormatSource | None = None) -> ReaderGraph:
        """Return the LangGraph graph without a checkpointer. As a node, it uses the checkpointer of its parent graph.

        Args:
            response_format: the form of structured answers, which `answer` then has as JSON.
        """
        return build_graph(await self.aprepare(), self.strategy).with_response_format(response_format)

    graph = make_synchronous(agraph)

    async def aclose(self) -> None:
        """Close the connections and the checkpoint file of the running loop, and the run log if the reader opened it.

        A further read opens them again.
        """
        await self._graphs.aclose()
        if self._owns_policy and hasattr(self.policy, "aclose"):
            await self.policy.aclose()
        if self.run_log is not None and self._owns_log:
            await asyncio.to_thread(self.run_log.close)

    close = make_synchronous(aclose)

    async def _close_graphs(self, graphs: list[ReaderGraph]) -> None:
        for graph in graphs:
            if isinstance(self._checkpoints, str | Path) and isinstance(graph.checkpointer, BaseCheckpointSaver):
                await graph.checkpointer.aclose()  # type: ignore[attr-defined]

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _make_graph(self) -> ReaderGraph:
        """Return the graph of the running loop, with the reader's checkpointer."""
        context = await self.aprepare()
        graphs = self._graphs.get()
        async with self._prepare_lock.get():  # otherwise, parallel first reads would all open the checkpoints
            if not graphs:
                saver = await open_checkpointer(self._checkpoints)
                graphs.append(build_graph(context, self.strategy, checkpointer=saver))
        return graphs[0]

    async def _continue(
        self, run_id: str, document: DocumentSource | None = None, response_format: ResponseFormatSource | None = None
    ) -> tuple[ReaderGraph, Mapping[str, Any]]:
        """Return the graph and the newest state of a run. Raises RunMismatchError if this reader has other settings."""
        graph = await self._make_graph()
        state = (await load_newest_snapshot(graph, run_id)).values
        logged_settings: Mapping[str, Any] = {}
        if self.run_log is not None:
            with suppress(RunError):  # the run may not be in this log
                logged_settings = (await asyncio.to_thread(self.run_log.get, run_id)).settings
        graph = graph.with_response_format(load_format_for_resume(state, response_format, logged_settings, run_id))
        settings = graph.reader_context.settings
        if state.get("settings", settings) != settings:
            raise RunMismatchError(
                "this reader has another strategy, tokenizer, chunk size, memory size or wording than the run began "
                f"with ({settings} now, {state['settings']} then)",
                hint="Continue with the settings that the run began with. --strategy chooses the strategy.",
                run_id=run_id,
            )
        if document is None:
            return graph, state
        try:
            await self.store.reattach(state["document"], Document.of(document))
        except DocumentMismatchError as error:
            raise RunMismatchError(
                f"this is another document than {state['document']['name']}, which the run began with",
                hint="Resume with the same document, or start a new run.",
                run_id=run_id,
            ) from error
        return graph, state

    async def _start(
        self, document: DocumentSource, question: str, options: ReadOptions, *, yields_updates: bool = True
    ) -> AsyncGenerator[MemoryUpdate | ReadResult, None]:
        """Start a read and run it to its end."""
        graph = (await self._make_graph()).with_response_format(options.get("response_format"))
        check_question(question, graph.reader_context)
        check_options(options)
        run_id = options.get("run_id") or new_run_id()
        reference = await store_document(document, self.store, pages=options.get("pages"))
        initial_state = {"question": question, "document": reference, "run_id": run_id}
        if graph.reader_context.response_format is not None:
            initial_state["settings"] = graph.reader_context.settings
        trace = Trace((), reference["size"])
        with await lease_run(graph.checkpointer, run_id):
            stream = self._run(graph, initial_state, initial_state, trace, options, yields_updates=yields_updates)
            async with aclosing(stream) as items:
                async for item in items:
                    yield item

    async def _run(
        self,
        graph: ReaderGraph,
        graph_input: Any,
        state: Mapping[str, Any],
        trace: Trace,
        options: ReadOptions,
        *,
        yields_updates: bool = True,
    ) -> AsyncGenerator[MemoryUpdate | ReadResult, None]:
        """Run the graph from `state` to its end. Yield memory updates if `yields_updates`, then the result."""
        run_id = state["run_id"]
        context = replace(
            graph.reader_context,
            limits=options.get("limits") or graph.reader_context.limits,
            on_hidden_update=None if yields_updates else trace.add_change,
            previous_trace=trace,
            barrier=options.get("barrier"),
        )
        values: dict[str, Any] = dict(state)
        caller_config = options.get("config") or {}
        tracing_config: Any = {name: value for name, value in caller_config.items() if name in _TRACING_KEYS}
        config: RunnableConfig = {**tracing_config, **make_thread_config(run_id)}
        stream = graph.astream(graph_input, config, context=context, stream_mode=["updates", "values"])
        with suppress(EmptyInputError):  # raised for a state without a next step
            async with aclosing(stream):
                async for mode, data in stream:
                    if mode == "values":
                        values = data
                        continue
                    for change in filter(None, data.values()):
                        for update in trace.add_change(change):
                            if yields_updates:
                                yield update
        if not values.get("stop_reason"):
            raise CheckpointError(
                "the checkpoints hold no state that this reader can continue: no step is next, and the run did not end",
                hint="They are damaged, or another program wrote them. Read the document again.",
                run_id=run_id,
            )
        yield make_result_from_state(graph, values, trace)


def _open_log(run_log: RunLog | Path | str | bool) -> RunLog | None:
    if isinstance(run_log, bool):
        return RunLog(get_default_run_log_path()) if run_log else None
    return run_log if isinstance(run_log, RunLog) else RunLog(run_log)
