"""Multi-hop questions have one right answer, which takes every fact of the chain, in the order that is asked for."""

import re
from collections import defaultdict

import pytest

from memagent_evaluation import planted_facts
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.generated import source
from memagent_evaluation.tasks.invented_names import WORDS, Kind, Names
from memagent_evaluation.tasks.multi_hop import MULTI_HOP, RELATIONS, HopOrder
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")


def any_of(words):
    return f"(?:{'|'.join(WORDS[words])})"


NAME = {
    Kind.PERSON: f"{any_of('first_names')} {any_of('surnames')}",
    Kind.TOWN: f"{any_of('town_starts')}{any_of('town_ends')}",
    Kind.COMPANY: f"[Tt]he {any_of('company_names')} {any_of('trades')}",
    Kind.THING: f"[Tt]he {any_of('thing_marks')} {any_of('things')}",
}


def statement_pattern(template, relation):
    escaped = re.escape(template).replace(r"\{s\}", f"(?P<s>{NAME[relation.of]})")
    return escaped.replace(r"\{o\}", f"(?P<o>{NAME[relation.to]})")


STATEMENTS = [
    (name, re.compile(statement_pattern(template, relation)))
    for name, relation in RELATIONS.items()
    for template in relation.statements
]


def lower_article(name):
    return name[0].lower() + name[1:] if name.startswith("The ") else name


def graph_of(text):
    """All facts of a text: for each relation and entity, everything that stands in it to the entity."""
    graph = defaultdict(set)
    for name, statement in STATEMENTS:
        for match in statement.finditer(text):
            graph[name, lower_article(match["s"])].add(lower_article(match["o"]))
    return graph


def understood(question):
    """The beginning and the relations that a question names, in the order in which they are followed."""
    relations = []
    templates = {name: relation.question for name, relation in RELATIONS.items()}
    asked = question
    while True:
        for name, template in templates.items():
            if match := re.fullmatch(re.escape(template).replace(r"\{s\}", "(.+)"), asked):
                asked = match[1]
                relations.insert(0, name)
                break
        else:
            return asked, relations
        templates = {name: relation.phrase for name, relation in RELATIONS.items()}


def ends(graph, question):
    """Where all paths through a graph end that a question describes."""
    start, relations = understood(question)
    reached = {start}
    for relation in relations:
        reached = {end for each in reached for end in graph[relation, each]}
    return {end.removeprefix("the ") for end in reached}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("haystack") / "book.txt"
    path.write_text(" ".join(f"Line {number} of the book is short." for number in range(3000)))
    return path


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", MULTI_HOP)
def test_one_answer_is_right_and_the_evidence_alone_leads_to_it(name, small):
    hops, _ = MULTI_HOP[name]
    task = load_task(name, TaskSettings(TOKENIZER, small=small))
    for index in range(5):
        sample = task.sample(2500, index)
        text = "".join(sample.text())
        graph = graph_of(text)
        assert all(len(found) == 1 for found in graph.values())
        assert sum(map(len, graph.values())) == hops + task.distractors
        assert ends(graph, sample.question) == set(sample.gold)
        assert ends(graph_of(" ".join(each.text for each in sample.needles)), sample.question) == set(sample.gold)
        assert len(sample.needles) == hops == len(understood(sample.question)[1])
        for left_out in sample.needles:
            rest = " ".join(each.text for each in sample.needles if each is not left_out)
            assert not ends(graph_of(rest), sample.question), "each fact is needed"
        assert all(text[round(each.depth * len(text)) :].startswith(each.text) for each in sample.needles)
        assert not any(each.gold in sample.question for each in sample.needles), "neither the answer nor the middle"
        assert TOKENIZER.count(sample.question) <= 96


@pytest.mark.parametrize("name", MULTI_HOP)
def test_facts_stand_in_the_order_of_the_name(name, book):
    hops, order = MULTI_HOP[name]
    task = load_task(name, TaskSettings(TOKENIZER, haystack=book))
    orders = set()
    for index in range(20):
        sample = task.sample(2500, index)
        start, relations = understood(sample.question)
        graph = graph_of(" ".join(each.text for each in sample.needles))
        followed = []
        for relation in relations:
            (start,) = graph[relation, start]
            followed.append(start.removeprefix("the "))
        orders.add(tuple(followed.index(each.gold) for each in sample.needles))
    forward = tuple(range(hops))
    if order is HopOrder.SHUFFLED:
        assert len(orders) >= hops
    else:
        assert orders == {forward if order is HopOrder.FORWARD else forward[::-1]}


@pytest.mark.parametrize("gap", [0.05, 0.2, 0.45])
def test_the_gap_is_the_distance_of_neighbouring_facts(gap, book):
    for order in ("", "_backward"):
        task = load_task(f"multi_hop_3{order}:gap={gap}:distractors=8", TaskSettings(TOKENIZER, haystack=book))
        for index in range(5):
            first, second, third = (needle.depth for needle in task.sample(6000, index).needles)
            assert second - first == pytest.approx(gap, abs=0.03)
            assert third - second == pytest.approx(gap, abs=0.03)


def test_distractors_share_relations_and_entities_with_the_chain():
    task = load_task("multi_hop_2_backward", TaskSettings(TOKENIZER))
    for index in range(8):
        sample = task.sample(2500, index)
        start, relations = understood(sample.question)
        graph = graph_of("".join(sample.text()))
        rivals = [subject for relation, subject in graph if relation == relations[-1]]
        assert len(rivals) >= 4, "others stand in the last relation, too"
        halves = set(start.removeprefix("the ").split())
        begins = [subject for relation, subject in graph if relation == relations[0] and subject != start]
        assert any(halves & set(each.split()) for each in begins) or relations[0] in {"mayor", "builder"}
        assert any(subject == start and relation not in relations for relation, subject in graph)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("multi_hop_4:gap=0.4", r"4 facts with gaps of 0\.4 of a document do not fit.* less than 0\.33"),
        ("multi_hop_2:gap=-1", "do not fit"),
        ("multi_hop_2:distractors=-1", "cannot have -1 distractors"),
        ("multi_hop_2:distractors=many", "distractors=many is not valid"),
        ("multi_hop_2:hops=3", "has no option 'hops'.*gap, distractors"),
        ("vt:hops=3", "vt has no option 'hops'.*none"),
        ("multi_hop_2:gap=0.1:gap=0.2", "option twice"),
        ("multi_hop_5", "Did you mean multi_hop_"),
    ],
)
def test_options_that_cannot_be_are_refused(name, message):
    with pytest.raises(EvaluationError) as caught:
        load_task(name, TaskSettings(TOKENIZER))
    assert re.search(message, f"{caught.value.message} {caught.value.hint}")


def test_more_facts_than_there_are_names_for_are_refused():
    task = load_task("multi_hop_2:distractors=3000", TaskSettings(TOKENIZER))
    with pytest.raises(EvaluationError, match="more names"):
        task.sample(1_000_000, 0)


def test_options_are_part_of_the_name_and_of_the_samples():
    plain, wide = (
        load_task(name, TaskSettings(TOKENIZER)) for name in ("multi_hop_2", "multi_hop_2:gap=0.3:distractors=2")
    )
    assert wide.name == "multi_hop_2:gap=0.3:distractors=2"
    assert wide.sample(1500, 3).id == "multi_hop_2:gap=0.3:distractors=2/1500/3"
    assert (wide.gap, wide.distractors, wide.hops) == (0.3, 2, plain.hops)


def test_invented_words_are_not_those_that_other_tasks_plant():
    planted = {*planted_facts.ADJECTIVES, *planted_facts.NOUNS, *planted_facts.NAME_TITLES}
    planted |= {
        start + middle + end
        for start in planted_facts.NAME_STARTS
        for middle in ("", *planted_facts.NAME_MIDDLES)
        for end in planted_facts.NAME_ENDS
    }
    folded = {word.lower() for word in planted}
    towns = {(start + end).lower() for start in WORDS["town_starts"] for end in WORDS["town_ends"]}
    whole = {word.lower() for kind, words in WORDS.items() if not kind.startswith("town") for word in words}
    assert not folded & (towns | whole)
    assert all(len(set(words)) == len(words) > 10 for words in WORDS.values())
    assert len(towns) == len(WORDS["town_starts"]) * len(WORDS["town_ends"]), "no town in two ways"


def test_names_are_never_drawn_twice_and_resembling_ones_share_a_half():
    names = Names(source(TaskSettings(TOKENIZER), "names"))
    drawn = []
    for kind in Kind:
        for _ in range(60):
            drawn.append(names.new(kind))
            like = names.resembling(drawn[-1])
            assert sum(one == other for one, other in zip(like.halves, drawn[-1].halves, strict=True)) == 1
            drawn.append(like)
    assert len({each.name for each in drawn}) == len(drawn)
