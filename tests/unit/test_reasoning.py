"""Reasoning is removed from a reply only where the structure of the reply marks it."""

from __future__ import annotations

import pytest

from memagent_graph.reasoning import extract_reply

REPLY = "SECRET umbrella = 4711"

REASONING = [
    "<think>maybe heron = 1</think>",
    "<think>\nmaybe heron = 1\n</think>\n\n",
    "\n<think>one</think>\n<think>two</think>\n",
    "<think> okay, so it may be the heron </think> ",
    "<think>\n\n</think>\n\n",
    "<think>a<think>b</think>c</think>",
    "<thinking>maybe heron = 1</thinking>\n",
    "<Thought>\nmaybe heron = 1\n</Thought>\n",
    '<reasoning effort="high">maybe heron = 1</reasoning>\n',
    "<seed:think>maybe heron = 1</seed:think>",
    "<antThinking>maybe heron = 1</antThinking>\n",
    "<scratchpad>maybe heron = 1</scratchpad>\n",
    '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> maybe heron = 1\n</details>\n',
    "[THINK]maybe heron = 1[/THINK]",
    "◁think▷maybe heron = 1◁/think▷",
    "<|think|>maybe heron = 1<|end|><|begin|>assistant<|content|>",
    "<|thinking|>maybe heron = 1<|/thinking|>",
    "<|START_THINKING|>maybe heron = 1<|END_THINKING|><|START_RESPONSE|>",
    "<|begin_of_thought|>\nmaybe heron = 1\n<|end_of_thought|>\n\n<|begin_of_solution|>\n",
    "<|inner_prefix|>maybe heron = 1<|inner_suffix|>",
    "<|channel>thought\nmaybe heron = 1\n<channel|>",
    "<unused94>thought\nmaybe heron = 1<unused95>",
    "<|im_start|>think\nmaybe heron = 1\n<|im_start|>answer\n",
    "Here is my thought process: maybe heron = 1.\n\nHere is my response: ",
    "<|channel|>analysis<|message|>maybe heron = 1<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>x<|end|>"
    "<|start|>assistant<|channel|>final <|constrain|>text<|message|>",
    "maybe heron = 1<|end|><|start|>assistant<|channel|>final<|message|>",
    "analysisThe user asks for it, maybe heron = 1.assistantfinal",
    "maybe heron = 1\n</think>\n\n",
    "maybe heron = 1</think>",
    "It may be the heron.</think> ",
    "maybe heron = 1\n[/THINK]\n",
    "</think>\n\n",
]
"""Reasoning before a reply, each in the format of a model family or a server."""
ECHOES = ["<|begin_of_text|><|begin_of_text|>", "<s> ", "assistant\n\n"]
"""Remains of the chat template before a reply."""
TURN_ENDS = [
    "",
    "<|im_end|>",
    "</s>",
    "<|return|>",
    "\n<|eot_id|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|></s>",
    "<pad>" * 20_000,
    "\0\0",
    "<|im_end|>\n<|im_start|>user\nAnd what is the key of barn?",
]

PROSE = [
    "The model writes <think> before its reasoning.",
    "The model ends its reasoning with </think> and answers.",
    "The tags are <think> and </think>.",
    "<think> and </think> are the tags of R1.",
    "<think> is the tag that opens reasoning.",
    "</think> closes the block.",
    "`<think>` opens and `</think>` closes.",
    'It looks for "<think>" and "</think>" in a reply.',
    "A reply begins with `<think>`",
    "Its reasoning ends with </think>",
    "Reasoning stands between <think>...</think> tags.",
    "<think>…</think> is removed by the server.",
    "Between <think> and </think>, the model wrote 400 tokens.",
    "Section 3.2 names four tags: <think>, <thinking>, <reasoning>, <thought>.",
    "- <think>: opens\n- </think>: closes",
    "* the tag <think>\n* the tag </think>",
    "| tag | meaning |\n|---|---|\n| <think> | opens |\n| </think> | closes |",
    "Template:\n```\n<think>\nreasoning\n</think>\nanswer\n```",
    "```xml\n<think>hm</think>\n```\nis what the file has.",
    "~~~\n<think>\nhm\n</think>\n~~~",
    "He typed <think>hm</think>ok in the box.",
    'She wrote "<think> twice" on the board.',
    "Tags:\n<think>\n<thinking>\n<reasoning>",
    "Tags:\n<think>\n</think>",
    "x < 3 and y > 2, so x<y holds; see [THINK] for THINK Ltd.",
    "[THINK] is written by Magistral.",
    "Magistral writes [THINK] and [/THINK] around it.",
    "◁think▷ and ◁/think▷ are Kimi's markers.",
    "GPT-OSS has the channels analysis, commentary and final.",
    "The header is <|channel|>analysis<|message|> in GPT-OSS.",
    "Its answer follows <|channel|>final<|message|>, and <|return|> ends it.",
    "analysis of the report: revenue rose by 3%.",
    "analysis, assistant final exam",
    "Analysis by the assistant; final version of May.",
    "assistantfinal is what is left of the header.",
    "Command A writes <|START_THINKING|> first.",
    "ChatML ends a turn with <|im_end|>",
    "A turn ends with `<|im_end|>`",
    "Llama 2 ends it with </s>",
    "He struck it out: <s>twelve crowns</s>",
    "<|im_start|>user\nhello<|im_end|>",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>",
    "<s>twelve</s> ten crowns",
    "Turns end with <|im_end|>; <|im_start|> begins one.",
    "Assistant\n\nOffice 4",
    "Here is my thought: revenue fell.",
    "The letter says: here is my thought process: buy low.",
    "Answer in <answer>42</answer> tags.",
    "<answer>42</answer>",
    "<details><summary>Costs</summary>12 crowns</details>",
    "His thoughts: <b>heron</b> is at [3].",
    "if a < b: print('<think>')",
    "re.sub(r'<think>.*?</think>', '', text)",
    "模型用 <think> 开始思考, 用 </think> 结束。",
    "モデルは「<think>」で始まる。",
    "[1, 2, 3] and <b>bold</b> text\n\n  with spaces  \n",
    "INST [INST] markers are Llama's.",
    "The prompt ends in [/INST] and the reply follows.",
    "A <details> element with reasoning inside is HTML.",
]


@pytest.mark.parametrize("reasoning", REASONING + ECHOES)
def test_reasoning_before_a_reply_and_turn_ends_after_it_are_removed(reasoning: str) -> None:
    for end in TURN_ENDS:
        assert extract_reply(reasoning + REPLY + end).strip() == REPLY, end


@pytest.mark.parametrize("text", PROSE)
def test_a_text_that_only_mentions_a_marker_is_unchanged(text: str) -> None:
    assert extract_reply(text) == text


@pytest.mark.parametrize(
    "opening", ["<think>", "<think>\n", "[THINK]", "<|channel|>analysis<|message|>", "<|START_THINKING|>", "◁think▷"]
)
def test_reasoning_that_was_cut_off_leaves_an_empty_reply(opening: str) -> None:
    assert not extract_reply(f"{opening}cut off").strip()


def test_a_reasoning_block_on_separate_lines_is_removed() -> None:
    fenced, blocks = "```\n<think></think>\n```\n" * 70, "<think>\nor\n</think>\n" * 150
    assert extract_reply(f"{fenced}{blocks}so") == f"{fenced}so"
    assert extract_reply(f"{blocks}so\n<think>\n{blocks}</think>\nor\n{blocks}so").strip() == "so\nor\nso"
    assert extract_reply(f"{REPLY}\n<think>\nor heron") == f"{REPLY}\n"
    for hostile_text in ("\n<think>" * 20_000, "\n<think>" * 9_000 + "</think>x" * 9_000):
        assert extract_reply(REPLY + hostile_text) == REPLY + hostile_text


def test_answer_tags_around_the_whole_reply_are_removed_with_the_reasoning() -> None:
    assert extract_reply(f"<think>hm</think>\n<answer>{REPLY}</answer>") == REPLY


def test_a_marker_that_is_mentioned_after_the_reasoning_is_kept() -> None:
    for mention in ("It closes with </think> and goes on.\n" * 70, "- </think> Number\n" * 70):
        assert extract_reply(f"<think>hm</think>{mention}") == extract_reply(f"hm\n</think>{mention}") == mention
