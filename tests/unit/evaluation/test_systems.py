"""Systems of an evaluation: loading by name, identities, prompts, run ids and outcomes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scripts import make_document, read_perfectly
from support.strategies import EXAMPLE

from memagent_evaluation.result_table import QuestionOutcome
from memagent_evaluation.systems import list_systems, load_system
from memagent_graph import ANSWER, Document, Limits, MemAgent, ScriptedPolicy, load_prompts
from memagent_graph.errors import EvaluationError, RunMismatchError
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policies.profile import load_profile
from memagent_graph.policy import SamplingParams
from memagent_graph.storage.checkpoints import open_checkpointer
from memagent_graph.strategies.overwrite import REFINE, Refine

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=900)
QUESTION = "What is the key of harbor?"


class DescribedPolicy(ScriptedPolicy):
    """A scripted policy that describes its model."""

    info = ModelInfo(context_window=2000)

    async def describe(self) -> ModelInfo:
        return self.info


@pytest.fixture
def document(make_reader):
    return make_reader().store.add(Document.of(TEXT))


def load_memagent(make_reader, policy, **options):
    return load_system("memagent", make_reader(policy, **options))


@pytest.mark.parametrize("name", [*list_systems(), EXAMPLE])
async def test_every_system_loads_by_name_and_identifies_its_strategy(make_reader, name) -> None:
    system = load_system(name, make_reader(strategy="refine"))
    assert system.name == name
    strategy_names = {"memagent": "refine", EXAMPLE: "own_gate"}
    assert (await system.compute_identity()).split()[0] == system.strategy.name == strategy_names.get(name, name)


async def test_identity_has_strategy_options_and_role_templates(make_reader, monkeypatch) -> None:
    systems = [load_system(f"retrieval:chunks={chunk_count}", make_reader()) for chunk_count in (0, 3, 4, 3)]
    identities = [await system.compute_identity() for system in systems]
    assert len(set(identities)) == 3
    assert identities[1] == identities[3]
    refine_identity = await load_system("refine", make_reader()).compute_identity()
    template = REFINE.template.replace("draft of the solution", "sketch of the solution")
    monkeypatch.setattr(Refine, "roles", (replace(REFINE, template=template), ANSWER))
    assert await load_system("refine", make_reader()).compute_identity() != refine_identity


async def test_unknown_system_error_suggests_similar_names(make_reader) -> None:
    with pytest.raises(EvaluationError, match=r"no system 'full-context'\. Did you mean full_context"):
        load_system("full-context", make_reader())
    with pytest.raises(EvaluationError, match=r"'zzz'\. Available systems"):
        load_system("zzz", make_reader())


async def test_full_context_uses_the_profile_of_the_policy_if_the_reader_does(make_reader, tmp_path) -> None:
    profile = load_profile("embedded")
    policy = DescribedPolicy(read_perfectly)
    policy.info = replace(DescribedPolicy.info, profile=profile)
    policy_reader = MemAgent(policy, tokenizer="embedded", store=tmp_path, run_log=False)
    plain_reader = make_reader(policy, prompts=load_prompts(), run_log=False)
    prompts_reader = make_reader(DescribedPolicy(read_perfectly), prompts=profile.prompts, run_log=False)
    profile_reader = make_reader(DescribedPolicy(read_perfectly), prompts=None, profile=profile, run_log=False)
    for reader, call_count in ((policy_reader, 2), (plain_reader, 1), (prompts_reader, 1), (profile_reader, 2)):
        attempt = await load_system("full_context", reader).attempt(
            reader.store.add(Document.of("The key of harbor is 4711.")), QUESTION, answer_tokens=60, run_id="one"
        )
        assert attempt.usage.turns == call_count


async def test_run_id_of_another_question_or_document_is_refused(make_reader, document, tmp_path) -> None:
    saver = await open_checkpointer(tmp_path / "checkpoints.sqlite")
    system = load_memagent(make_reader, None, checkpoints=saver)
    await system.attempt(document, QUESTION, answer_tokens=60, run_id="one")
    with pytest.raises(RunMismatchError, match="another question or document"):
        await system.attempt(document, "What is the key of castle?", answer_tokens=60, run_id="one")
    other_document = make_reader().store.add(Document.of(TEXT + "!"))
    with pytest.raises(RunMismatchError, match="another question or document"):
        await system.attempt(other_document, QUESTION, answer_tokens=60, run_id="one")
    await saver.aclose()


async def test_attempt_without_an_answer_has_the_reason(make_reader, document) -> None:
    system = load_memagent(make_reader, None, limits=Limits(max_chunks=2))
    attempt_at_limit = await system.attempt(document, QUESTION, answer_tokens=60, run_id="stopped")
    assert (attempt_at_limit.outcome, attempt_at_limit.answer) == (QuestionOutcome.UNFINISHED, None)
    assert attempt_at_limit.detail == "stopped at max_chunks after 2 chunks"

    silent_policy = ScriptedPolicy(lambda prompt: "a note" if "<section>" in prompt else "")
    system = load_memagent(make_reader, silent_policy)
    attempt = await system.attempt(document, QUESTION, answer_tokens=60, run_id="silent")
    assert (attempt.outcome, attempt.answer) == (QuestionOutcome.NO_ANSWER, None)
    assert attempt.detail == "empty: 3, resampled: 2"


async def test_each_repeat_has_its_own_seed_which_is_logged(make_reader, document, log) -> None:
    class SeedRecordingPolicy(DescribedPolicy):
        async def complete(self, prompt, sampling):
            seeds.add(sampling.seed)
            return await super().complete(prompt, sampling)

    seeds_of_repeats = []
    policy, sampling = SeedRecordingPolicy(read_perfectly), SamplingParams(temperature=0.7, seed=5)
    system = load_memagent(make_reader, policy, run_log=log, sampling=sampling)
    for repeat in range(3):
        seeds: set[int] = set()
        await system.attempt(document, QUESTION, answer_tokens=60, run_id=f"r{repeat}", repeat=repeat)
        seeds_of_repeats.append(min(seeds))
    assert len(set(seeds_of_repeats)) == 3
    assert seeds_of_repeats[0] == 5
    assert [log.get(f"r{repeat}").settings.get("seed") for repeat in (1, 2)] == seeds_of_repeats[1:]
