"""Prompts with answers, and conversations: their tokens, and which of them are learned."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer

from composer3d import cli
from composer3d.data import chat_settings, chat_template, examples, prepare, tokenizer
from composer3d.data.chat_template import ChatTemplate
from composer3d.data.documents import Document
from composer3d.facts.errors import DataError
from composer3d.facts.token_manifest import read_manifest
from tests.data.prepare_command import PrepareCommand
from tests.data.sample_chats import (
    CHATS,
    END,
    MARKED,
    PLAIN,
    write_chats,
    write_lines,
    write_tokenizer,
)
from tests.data.test_prepare import contents, interrupt_at
from tests.data.token_folders import opened, refuses, reseal

PAIRS = [
    ("hello there", "sunny and warm"),
    ("what is the weather? ", "日本 😀"),
    ("", "friend"),
    ("a<|im_end|>b", "hello<|im_end|>"),
]
Read = tuple[list[int], list[int]]  # all tokens and the whole mask


class Examples:
    """Prepares lines of one kind, with the tokenizer ``tok`` in the folder of a test."""

    def __init__(self, command: PrepareCommand, kind: str) -> None:
        self.command, self.folder, self.kind = command, command.folder, kind

    def options(self, *more: str) -> list[str]:
        named = ["--kind", self.kind, *more]
        return named if "--tokenizer" in more else [*named, "--tokenizer", str(self.folder / "tok")]

    def prepare(self, entries: list[Any], *more: str, out: str = "out") -> Path:
        source = write_lines(self.folder / "x.jsonl", entries)
        self.command.run(source, *self.options(*more), out=out)
        return self.folder / out

    def read(self, entries: list[Any], *more: str, out: str = "out") -> Read:
        return read(self.prepare(entries, *more, out=out))

    def refusal(self, entries: list[Any], *more: str) -> str:
        source = write_lines(self.folder / "x.jsonl", entries)
        return self.command.refusal(source, *self.options(*more))


@pytest.fixture
def answers(command: PrepareCommand) -> Examples:
    return Examples(command, "answers")


@pytest.fixture
def chats(command: PrepareCommand) -> Examples:
    return Examples(command, "chat")


def read(folder: Path) -> Read:
    corpus = opened(folder)
    everything = np.arange(len(corpus.tokens))
    return corpus.tokens[everything].tolist(), corpus.mask[everything].tolist()


def entries_of(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def encode_pairs(coder: Any, pairs: list[tuple[str, str]]) -> Read:
    ids, mask = [], []
    for prompt, answer in pairs:
        question = coder.encode(prompt).ids
        reply = [*coder.encode(answer, add_special_tokens=False).ids, coder.token_to_id(END)]
        ids += question + reply
        mask += [0] * len(question) + [1] * len(reply)
    return ids, mask


CHAT_LINES = [{"id": 7, "messages": chat} for chat in CHATS]


@pytest.mark.parametrize("shard_tokens", ["1", "1000"])
def test_answers_are_learned_and_prompts_are_not(
    answers: Examples, tmp_path: Path, shard_tokens: str
) -> None:
    coder = write_tokenizer(tmp_path / "tok", eos=END)
    entries = [{"question": prompt, "completion": answer} for prompt, answer in PAIRS]
    fields = ["--prompt-field", "question", "--answer-field", "completion"]
    expected = encode_pairs(coder, PAIRS)
    assert answers.read(entries, *fields, "--shard-tokens", shard_tokens) == expected
    manifest = read_manifest(tmp_path / "out")
    assert manifest.learned == sum(expected[1])
    assert len(manifest.shards) == (len(PAIRS) if shard_tokens == "1" else 1)


def test_a_split_and_more_processes_keep_masks_with_their_tokens(
    answers: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 100)  # so that both processes are used
    coder = write_tokenizer(tmp_path / "tok", eos=END)
    pairs = [(f"what is {n}?", f"warm {n}") for n in range(40)]
    options = ["--split", "0.3", "--processes", "2", "--shard-tokens", "100"]
    out = answers.prepare(entries_of(pairs), *options)
    found = []
    for name in ("train", "validation"):
        ids, mask = read(out / name)
        cuts = np.flatnonzero(np.array(ids) == coder.token_to_id(END)) + 1
        parts = zip(np.split(ids, cuts), np.split(mask, cuts), strict=True)
        found += [(part.tolist(), bits.tolist()) for part, bits in parts if len(part)]
    assert sorted(found) == sorted(encode_pairs(coder, [pair]) for pair in pairs)


def test_masks_of_chats_are_those_of_transformers(chats: Examples, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    coder = write_tokenizer(tmp_path / "tok")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "tok")
    ids, mask = [], []
    for chat in CHATS:
        encoded = theirs.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        ids += [*encoded["input_ids"], coder.token_to_id(END)]
        mask += [*encoded["assistant_masks"], 0]
    assert sum(mask) > 20
    assert chats.read(CHAT_LINES) == (ids, mask)


def test_without_marks_the_turns_are_what_each_adds(chats: Examples, tmp_path: Path) -> None:
    """The line break after a turn belongs to it; else the result is that of the marks."""
    coder = write_tokenizer(tmp_path / "tok", PLAIN)
    plain = chats.read(CHAT_LINES, out="plain")
    # The file of a template comes before the one in tokenizer_config.json, and the option first.
    (tmp_path / "tok/chat_template.jinja").write_text(MARKED)
    marked = chats.read(CHAT_LINES, out="marked")
    (tmp_path / "plain.jinja").write_text(PLAIN)
    options = ["--tokenizer", str(tmp_path / "tok/tokenizer.json")]
    options += ["--chat-template", str(tmp_path / "plain.jinja")]
    assert chats.read(CHAT_LINES, *options, out="option") == plain
    assert plain[0] == marked[0]
    ends = np.flatnonzero(np.diff(marked[1], append=0) == -1) + 1
    assert len(ends) == 4
    expected = np.array(marked[1])
    line_break = coder.encode("\n", add_special_tokens=False).ids
    assert [[plain[0][end]] for end in ends] == [line_break] * 4
    expected[ends] = 1
    assert plain[1] == expected.tolist()


SILENT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "it is warm", "weight": 0},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "sunny", "train": True},
]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_turns_and_lines_that_are_not_learned_are_input(
    chats: Examples, tmp_path: Path, template: str
) -> None:
    coder = write_tokenizer(tmp_path / "tok", template)
    plain = {"messages": [{"role": turn["role"], "content": turn["content"]} for turn in SILENT]}
    tokens, mask = map(np.array, chats.read([plain] * 3, out="all"))
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    assert len(starts) == 6
    # The same tokens. Those of the first turn, and of the third line, are not learned.
    mask[: starts[1]] = 0
    mask[starts[4] :] = 0
    entries = [{"messages": SILENT}, plain, plain | {"train": False}]
    assert chats.read(entries, out="silent") == (tokens.tolist(), mask.tolist())
    for out in ("all", "silent"):
        assert read_manifest(tmp_path / out).turn_ends == (coder.token_to_id("<|im_end|>"),)


@pytest.mark.parametrize("coder", ["tok", "bytes"])
def test_answers_of_lines_that_are_not_learned_are_input(
    answers: Examples, tmp_path: Path, coder: str
) -> None:
    write_tokenizer(tmp_path / "tok", eos=END)
    entry: dict[str, Any] = {"prompt": "é", "answer": "bc"}
    options = ["--tokenizer", "bytes"] if coder == "bytes" else []
    ids, mask = answers.read([entry | {"weight": 0}, entry], *options)
    if coder == "bytes":
        assert ids == [*"ébc".encode(), 0] * 2
    half = len(ids) // 2
    assert mask == [0] * half + [0] * (half - 3) + [1] * 3


def test_no_folder_is_made_in_which_nothing_is_learned(answers: Examples) -> None:
    entry = {"prompt": "a", "answer": "b", "train": False}
    line = answers.refusal([entry], "--tokenizer", "bytes")
    assert "no token is learned, because all examples say" in line


TWO_MARKS = MARKED.replace(
    "{% generation %}", "{% generation %}a{% endgeneration %}{% generation %}"
)
# As many marks as turns, but both are of the second turn.
SHIFTED = (
    "{% for m in messages %}{% if loop.index == 4 %}{% generation %}a{% endgeneration %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [TWO_MARKS, SHIFTED], ids=["two", "shifted"])
def test_marks_that_do_not_tell_turns_apart_are_refused(
    chats: Examples, tmp_path: Path, template: str
) -> None:
    write_tokenizer(tmp_path / "tok", template)
    before = f"{tmp_path}/x.jsonl:1: the chat template does not put one {{% generation %}} "
    assert chats.refusal([{"messages": SILENT}]).startswith(before)


def test_a_text_begins_once(answers: Examples, chats: Examples, tmp_path: Path) -> None:
    coder = write_tokenizer(tmp_path / "tok", eos=END)
    prompts = ("<s>hello", "<s><s>hello", "hello")
    source = write_lines(tmp_path / "x.jsonl", entries_of([(each, "warm") for each in prompts]))
    shown = answers.command.errors(0, source, *answers.options(), out="pairs")
    assert "note: 2 examples begin with the token that begins" in shown
    assert read(tmp_path / "pairs") == encode_pairs(coder, [("hello", "warm")] * 3)

    chat = [{"role": "user", "content": "<s>a"}, {"role": "assistant", "content": "b"}]
    template = "{{ bos_token }}{{ messages[0].content }}{% generation %}{{ messages[1].content }}"
    write_tokenizer(tmp_path / "tok", template + "{{ eos_token }}{% endgeneration %}")
    source = write_lines(tmp_path / "x.jsonl", [{"messages": chat}])
    shown = chats.command.errors(0, source, *chats.options(), out="chats")
    assert "note: 1 examples begin with the token that begins" in shown
    ids, mask = read(tmp_path / "chats")
    assert coder.decode(ids, skip_special_tokens=False) == "<s>ab<|im_end|>"
    assert mask == [0, 0, 1, 1]


# The template, the tokenizer's own end, and the end of its documents.
ENDS: dict[str, tuple[str, str, str]] = {
    "it ends turns": (MARKED, "<|im_end|>", END),
    "it ends nothing else": (MARKED.replace("eos_token", "'<|im_end|>'"), END, END),
    "not a usual one": (MARKED.replace("eos_token", "'<|im_end|>'"), "<|im_start|>", END),
    "it ends the conversation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ eos_token }}",
        "<|im_end|>",
        "<|im_end|>",
    ),
    "a template that refuses": ("{{ raise_exception('no') }}", "<s>", "<s>"),
}


@pytest.mark.parametrize(("template", "eos", "expected"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_conversation_stands_nowhere_within_it(
    tmp_path: Path, template: str, eos: str, expected: str
) -> None:
    coder = write_tokenizer(tmp_path / "tok", template, eos)
    opened = examples.open_example_tokenizer(str(tmp_path / "tok"), None, examples.Chat())
    opened.close()
    assert opened.end == coder.token_to_id(expected)


def test_tokens_that_end_learned_turns_are_kept(chats: Examples, tmp_path: Path) -> None:
    """Blanks may follow them. Others than special tokens, and turns that are not learned, do not
    count."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    coder = write_tokenizer(tmp_path / "tok", template)
    contents = {"<|im_start|>": 1, "a": 1, "<s>": 0, "a<|im_end|> ": 1}
    entries = [
        {"messages": [{"role": "assistant", "content": content, "weight": weight}]}
        for content, weight in contents.items()
    ]
    out = chats.prepare(entries, "--eod", END, "--shard-tokens", "1", "--split", "0.5")
    expected = sorted(map(coder.token_to_id, ("<|im_start|>", "<|im_end|>")))
    for split in ("train", "validation"):
        assert read_manifest(out / split).turn_ends == tuple(expected)


def test_a_split_keeps_conversations_together_whose_keys_are_in_another_order(
    chats: Examples, tmp_path: Path
) -> None:
    coder = write_tokenizer(tmp_path / "tok")
    messages = [{"role": "assistant", "content": f"warm {number}"} for number in range(100)]
    turned = [dict(reversed(message.items())) for message in messages]
    entries = [{"messages": [message]} for message in messages + turned]
    out = chats.prepare(entries, "--eod", END, "--split", "0.3")
    sides = []
    for name in ("train", "validation"):
        ids, _ = read(out / name)
        ends = np.flatnonzero(np.array(ids) == coder.token_to_id(END)) + 1
        sides.append({tuple(part) for part in np.split(ids, ends) if len(part)})
    assert len(sides[0]) + len(sides[1]) == len(messages)
    assert min(map(len, sides)) > 10


def test_a_conversation_that_ends_as_documents_do_gets_no_second_end(
    chats: Examples, tmp_path: Path
) -> None:
    without_break = MARKED.replace("{{ '\\n' }}", "")
    coder = write_tokenizer(tmp_path / "tok", without_break)
    entries = [{"talk": CHATS[1][1:]}]
    options = ["--field", "talk", "--eod", "<|im_end|>"]
    # The user's turn ends with the same token.
    chats.refusal(entries, *options)
    ends_no_question = without_break.replace(
        "{% else %}{{ m.content }}{{ eos_token }}", "{% else %}{{ m.content }}"
    )
    write_tokenizer(tmp_path / "tok", ends_no_question)
    ids, mask = chats.read(entries, *options)
    assert ids.count(coder.token_to_id("<|im_end|>")) == 1
    assert ids[-1] == coder.token_to_id("<|im_end|>")
    assert mask[-1] == 1


def test_tools_and_several_templates(chats: Examples, tmp_path: Path) -> None:
    coder = write_tokenizer(tmp_path / "tok")
    config = json.loads((tmp_path / "tok/tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "rag", "template": "x"},
        {"name": "default", "template": "{{ tools | tojson }}" + MARKED},
    ]
    (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps(config))
    ids, _ = chats.read([{"messages": CHATS[2], "tools": [{"a": "<é>"}]}])
    assert coder.decode(ids).startswith('[{"a": "<é>"}]')


# The files of a tokenizer without tokens and templates of its own.
NAMING = "[{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ think_token }}]"
OBJECT = {"content": "<|im_end|>", "lstrip": False}
TYPED = OBJECT | {"__type": "AddedToken"}
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in the map alone": ({}, {"bos_token": "<s>", "eos_token": OBJECT}),
    "in both": ({"bos_token": END}, {"bos_token": "<s>"}),
    "null in the configuration": ({"bos_token": None}, {"bos_token": "<s>"}),
    "null in the map": ({"bos_token": "<s>"}, {"bos_token": None}),
    "a map that is not read": ({"added_tokens_decoder": {}}, {"bos_token": "<s>"}),
    "objects": ({"bos_token": TYPED, "think_token": TYPED}, {}),
    "names of a model": ({"image_token": "<s>", "add_bos_token": True}, {"think_token": OBJECT}),
    "extra ones": ({"extra_special_tokens": {"image_token": "<s>", "think_token": TYPED}}, {}),
    "extra ones in both": (
        {"extra_special_tokens": {"image_token": "<s>"}, "image_token": END},
        {"extra_special_tokens": {"think_token": END}, "image_token": "<|im_start|>"},
    ),
    "a list of extra ones": ({"extra_special_tokens": ["<s>"]}, {}),
    "specific ones": ({"model_specific_special_tokens": {"image_token": "<s>"}}, {}),
}
READS_TOOLS = "{% if tools %}{% endif %}"
DEFAULT, TOOL_USE = (
    {"name": name, "template": name + READS_TOOLS} for name in ("default", "tool_use")
)
FILE, MORE = "chat_template.jinja", "additional_chat_templates"
TEMPLATES: dict[str, tuple[Any, dict[str, str]]] = {
    "a text": ("x" + READS_TOOLS, {}),
    "a list": ([TOOL_USE, DEFAULT], {}),
    "a list with a name twice": ([DEFAULT, DEFAULT | {"template": "x" + READS_TOOLS}], {}),
    "an object": ({"default": "x" + READS_TOOLS, "tool_use": "y" + READS_TOOLS}, {}),
    "a file": ([TOOL_USE, DEFAULT], {FILE: "file" + READS_TOOLS}),
    "a folder": (
        [TOOL_USE, DEFAULT],
        {FILE: "file" + READS_TOOLS, f"{MORE}/tool_use.jinja": "more" + READS_TOOLS},
    ),
    "a default in the folder": (
        "x" + READS_TOOLS,
        {FILE: "file" + READS_TOOLS, f"{MORE}/default.jinja": "more" + READS_TOOLS},
    ),
}


def rendered_by_both(folder: Path, tools: list[list[Any] | None]) -> tuple[list[str], list[str]]:
    """Return what we and transformers make of a message, with each of ``tools``."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    settings = chat_settings.read_chat_settings(folder, None, option="", way_out="")
    ours = chat_template.ChatTemplates(*settings)
    messages = [{"role": "user", "content": "a"}]
    return (
        [ours.render({"messages": messages, "tools": each, "silent": [0]})[0] for each in tools],
        [theirs.apply_chat_template(messages, tools=each, tokenize=False) for each in tools],
    )


def write_settings(folder: Path, config: dict[str, Any], files: dict[str, str]) -> None:
    """Write a tokenizer with these files beside it, and no others."""
    write_tokenizer(folder)
    files = {"tokenizer_config.json": json.dumps(config), **files}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)


@pytest.mark.parametrize(("config", "tokens"), NAMED.values(), ids=NAMED)
def test_templates_name_the_special_tokens_of_transformers(
    tmp_path: Path, config: dict[str, Any], tokens: dict[str, Any]
) -> None:
    files = {"special_tokens_map.json": json.dumps(tokens)}
    write_settings(tmp_path, config | {"chat_template": NAMING}, files)
    ours, theirs = rendered_by_both(tmp_path, [None])
    assert ours == theirs


@pytest.mark.parametrize(("template", "files"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_gets_the_template_of_transformers(
    tmp_path: Path, template: Any, files: dict[str, str]
) -> None:
    write_settings(tmp_path, {"chat_template": template}, files)
    ours, theirs = rendered_by_both(tmp_path, [None, [{"a": 1}], []])
    assert ours == theirs


def test_a_template_may_be_named(chats: Examples, tmp_path: Path) -> None:
    """As in transformers, it then renders conversations with tools too."""
    named = [
        {"name": name, "template": name + READS_TOOLS + MARKED} for name in ("rag", "tool_use")
    ]
    config = {"eos_token": "<|im_end|>", "chat_template": named}
    write_settings(tmp_path / "tok", config, {})
    entries = [{"messages": CHATS[2], "tools": [{"a": 1}]}]
    line = chats.refusal(entries)
    assert "has chat templates of the names rag, tool_use, and no default one; give one" in line
    line = chats.refusal(entries, "--chat-template", "agr")
    assert line.startswith("--chat-template agr: there is no such file, and ")
    assert "has chat templates of the names rag, tool_use; give the path" in line
    ids, _ = chats.read(entries, "--chat-template", "rag")
    coder = Tokenizer.from_file(str(tmp_path / "tok/tokenizer.json"))
    assert coder.decode(ids, skip_special_tokens=False).startswith("rag<|im_start|>")


@pytest.mark.parametrize("value", [7, [7], [{"name": "default"}], [{"name": [], "template": ""}]])
def test_templates_that_are_not_understood_are_refused(
    chats: Examples, tmp_path: Path, value: Any
) -> None:
    write_settings(tmp_path / "tok", {"chat_template": value}, {})
    line = chats.refusal(CHAT_LINES)
    assert "tokenizer_config.json: its chat_template must be a text, or a list" in line


# With a reasoning and calls of tools before each content.
CALLING = MARKED.replace(
    "{% generation %}",
    "{% generation %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}",
).replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson }}{{ mood }}")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"day": "today"}}}
CALLS: list[list[dict[str, Any]]] = [
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "hello"},
        {"role": "tool", "content": "warm", "name": "weather"},
        {"role": "assistant", "content": "sunny", "reasoning": "it is warm"},
    ],
    [{"role": "assistant", "content": "a", "reasoning_content": "b", "thinking": "c"}],
]


def test_reasoning_and_calls_of_tools_are_learned_as_in_transformers(
    chats: Examples, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    coder = write_tokenizer(tmp_path / "tok", CALLING)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "tok")
    ids, mask = [], []
    for chat in CALLS:
        encoded = theirs.apply_chat_template(
            chat, tools=[CALL], mood="x", return_dict=True, return_assistant_tokens_mask=True
        )
        ids += [*encoded["input_ids"], coder.token_to_id(END)]
        mask += [*encoded["assistant_masks"], 0]
    entries = [
        {"messages": chat, "tools": [CALL], "chat_template_kwargs": {"mood": "x"}} for chat in CALLS
    ]
    assert chats.read(entries) == (ids, mask)
    learned = coder.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    assert learned.startswith('<think>hello</think>{"name": "weather", "arg')
    assert learned.endswith("<think>it is warm</think>sunny<think>b</think>a")

    plain = CALLING.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    write_tokenizer(tmp_path / "tok", plain)
    found_ids, found_mask = chats.read(entries, out="plain")
    assert found_ids == ids
    # The line break after each of the turns is learned too.
    assert np.flatnonzero(np.array(found_mask) != mask).size == 3
    assert sum(found_mask) == sum(mask) + 3


DUMPED = "{% generation %}{% for key in m %}{{ m[key] | tojson }}{% endfor %}{% endgeneration %}"
LOST: dict[str, dict[str, Any]] = {
    "reasoning_content or thinking or reasoning": {"messages": [*CALLS[1], CALLS[0][0]]},
    "tool_calls": {"messages": [{**CALLS[0][1], "thinking": ""}]},
    "tools": {"messages": CHATS[0], "tools": [CALL]},
}


@pytest.mark.parametrize(("keys", "entry"), LOST.items(), ids=LOST)
def test_what_a_template_would_leave_out_is_refused(
    chats: Examples, tmp_path: Path, keys: str, entry: dict[str, Any]
) -> None:
    write_tokenizer(tmp_path / "tok")
    line = chats.refusal([entry])
    assert f"x.jsonl:1: the chat template does not read {keys}, so a part of the" in line
    # A template that reads all keys of a message, without their names.
    write_tokenizer(tmp_path / "tok", "{% for m in messages %}" + DUMPED + "{% endfor %}")
    if keys != "tools":
        chats.read([entry])


# Beginnings of templates that read no reasoning, although their source has the word.
SWITCHES: dict[str, str] = {
    "a variable": "{% if enable_thinking %}{{ thinking }}{% endif %}",
    "a mode": "{% if reasoning_mode == 'thinking' %}{{ '<thinking>' }}{% endif %}",
    "a namespace": "{% set ns = namespace(thinking=false) %}{% if ns.thinking %}x{% endif %}",
    "a comment": "{# message.reasoning_content is left out #}",
    "what is set": "{% set reasoning_content = '' %}{{ reasoning_content }}",
}


@pytest.mark.parametrize("beginning", SWITCHES.values(), ids=SWITCHES)
def test_a_switch_of_a_template_is_no_reading_of_a_message(beginning: str) -> None:
    template = ChatTemplate(beginning + MARKED, {})
    with pytest.raises(ValueError, match="does not read reasoning_content or thinking or reas"):
        template.render({"messages": CALLS[1]})
    # Nor is the value of a switch a part of the conversation that could be lost.
    switches = {"thinking": True, "reasoning": "high", "tool_calls": True}
    template.render({"messages": CHATS[2], **switches})


# Ways in which templates read a key of a message, here of the last message alone.
READINGS: dict[str, str] = {
    "attribute": "{% if m.KEY is string %}x{% endif %}",
    "item": "{% if m['KEY'] %}x{% endif %}",
    "get": "{% set found = m.get('KEY', '') %}",
    "in": "{% if 'KEY' in m %}x{% endif %}",
    "not in": "{% if 'KEY' not in m %}x{% endif %}",
    "selectattr": "{% if messages[-1:] | selectattr('KEY') | list %}x{% endif %}",
    "map": "{% if messages[-1:] | map(attribute='KEY') | select('string') | list %}x{% endif %}",
}


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", "tool_calls"])
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_a_template_may_read_a_part_and_leave_it_out(reading: str, key: str) -> None:
    loop = f"{{% for m in messages[-1:] %}}{reading.replace('KEY', key)}{{% endfor %}}"
    message = {"role": "assistant", "content": "hello", key: [CALL] if key == "tool_calls" else "x"}
    conversation = {"messages": [message, {"role": "user", "content": "warm"}]}
    ChatTemplate(loop + MARKED, {}).render(conversation)
    with pytest.raises(ValueError, match="so a part of the conversation would be lost"):
        ChatTemplate(MARKED, {}).render(conversation)


@pytest.mark.parametrize("role", ["system", "tool"])
def test_messages_that_a_template_leaves_out_are_refused(
    chats: Examples, tmp_path: Path, role: str
) -> None:
    template = MARKED.replace("in messages %}", f"in messages if m.role != '{role}' %}}")
    write_tokenizer(tmp_path / "tok", template)
    entry = {"messages": [{"role": role, "content": "hello"}, *CHATS[2]]}
    line = chats.refusal([entry])
    assert f"x.jsonl:1: the chat template leaves out messages of the role '{role}'; rem" in line
    chats.read([{"messages": [{"role": role, "content": ""}, *CHATS[2]]}])


def test_a_second_system_message_that_a_template_leaves_out_is_refused(
    chats: Examples, tmp_path: Path
) -> None:
    template = MARKED.replace(
        "in messages %}", "in messages if m.role != 'system' or m == messages[0] %}"
    )
    write_tokenizer(tmp_path / "tok", template)
    first, second = ({"role": "system", "content": content} for content in ("hello", "warm"))
    line = chats.refusal([{"messages": [first, *CHATS[2], second]}])
    assert "x.jsonl:1: the chat template leaves out messages of the role 'system'; rem" in line
    chats.read([{"messages": [first, *CHATS[2]]}])


def test_an_interrupted_prepare_of_examples_goes_on(
    answers: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path / "tok")
    entries = entries_of([(f"what is {n}?", f"warm {n}") for n in range(12)])
    options = ["--shard-tokens", "30"]
    answers.prepare(entries, *options, out="whole")

    with monkeypatch.context() as patch:
        interrupt_at(patch, KeyboardInterrupt(), 9)
        answers.command.errors(130, "x.jsonl", *answers.options(*options))
    assert (tmp_path / "out.partial/mask-00001.bin").exists()
    # Other keys, or no mask, would give other bytes.
    other = answers.options(*options, "--answer-field", "prompt")
    answers.command.refusal("x.jsonl", *other)
    answers.command.run("x.jsonl", *answers.options(*options))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_inspect_shows_what_is_learned(
    chats: Examples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "tok")
    source = write_chats(tmp_path / "x.jsonl")
    assert cli.main(chats.command.arguments(source, *chats.options())) == 0
    ids, mask = read(tmp_path / "out")
    assert f"out: {sum(mask)} tokens are learned (" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "out"), "--full"]) == 0
    out = capsys.readouterr().out
    assert f"learned      {sum(mask)} tokens ({sum(mask) / len(ids):.1%});" in out
    assert "assistant\\n«it is warm 😀 日本<|im_end|>»\\n<|im_start|>user" in out
    assert cli.main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["learned"] == sum(mask)
    assert sum(sample["learned"] for sample in report["samples"]) == sum(mask)


Change = Callable[[dict[str, Any]], Any]
WRONG_MANIFESTS: dict[str, tuple[Change, str]] = {
    "no count": (lambda m: m.pop("learned"), "it lacks learned"),
    "none": (lambda m: m.update(learned=0), "learned is 0, not a whole number from 1 to 24"),
    "too many": (lambda m: m.update(learned=25), "learned is 25, not a whole number from 1 to 24"),
    "no mask": (lambda m: m["files"].pop("mask-00000.bin"), "files lacks mask-00000.bin"),
    "short mask": (
        lambda m: m["files"]["mask-00000.bin"].update(bytes=23),
        "files.mask-00000.bin.bytes is 23, but its tokens and documents make 24",
    ),
    "mask of version 2": (lambda m: m.update(version=2), 'it has "learned", which does not belong'),
}


@pytest.fixture
def masked(answers: Examples) -> Path:
    """Token files of one short example."""
    entry = {"prompt": "0123456789", "answer": "abcdefghijklm"}
    return answers.prepare([entry], "--tokenizer", "bytes")


@pytest.mark.parametrize(("change", "message"), WRONG_MANIFESTS.values(), ids=WRONG_MANIFESTS)
def test_no_count_or_file_of_a_mask_is_trusted(masked: Path, change: Change, message: str) -> None:
    reseal(masked, change)
    with pytest.raises(DataError) as caught:
        opened(masked)
    assert f"tokens.json cannot be used ({message}" in caught.value.lines[0]


def test_no_mask_is_trusted(masked: Path) -> None:
    def put_last(value: int, *, sealed: bool) -> None:
        mask = (masked / "mask-00000.bin").read_bytes()[:-1] + bytes([value])
        (masked / "mask-00000.bin").write_bytes(mask)
        if sealed:
            entry = {"digests": [prepare.digest_of(mask)]}
            reseal(masked, lambda manifest: manifest["files"]["mask-00000.bin"].update(entry))

    digest = opened(masked).digest
    put_last(0, sealed=False)
    with refuses("is damaged"):
        opened(masked)
    put_last(2, sealed=True)
    with refuses("holds a byte above 1"):
        opened(masked)
    put_last(0, sealed=True)
    # A run cannot be resumed with another mask, and inspect finds that the count is wrong.
    assert opened(masked).digest != digest
    assert cli.main(["inspect", str(masked)]) == 0
    assert cli.main(["inspect", str(masked), "--full"]) == 1


LINES: dict[str, tuple[examples.Examples, str, str]] = {
    "no answer": (examples.Answers(), '{"prompt": "a"}', "a key is missing or is no text"),
    "no object": (examples.Answers(), "[]", "the line is no object"),
    "no JSON": (examples.Answers(), "{", "Expecting property name"),
    "a surrogate": (
        examples.Answers(),
        r'{"prompt": "\ud800", "answer": "a"}',
        "surrogates not allowed",
    ),
    "no messages": (examples.Chat(), "{}", "--field names another key"),
    "a wide number": (
        examples.Chat(),
        '{"messages": [{"role": "user", "content": "a", "x": 1e999}]}',
        "not JSON compliant",
    ),
}


@pytest.mark.parametrize(("kind", "line", "message"), LINES.values(), ids=LINES)
def test_wrong_lines_are_refused(kind: examples.Examples, line: str, message: str) -> None:
    with refuses(f"^x:2: .*{message}"):
        kind.parse(line.encode(), "x:2")


# The kind of the examples, a line that is refused when it is encoded or read as text, and why.
WRONG_TEXTS: dict[str, tuple[str, str, str]] = {
    "an end": ("answers", '{"prompt": "a", "answer": "a<|endoftext|>"}', "would end a document"),
    "preferences as text": ("text", '{"chosen": [], "rejected": []}', "--field chosen"),
    "no assistant": (
        "chat",
        '{"messages": [{"role": "user", "content": "a"}]}',
        "no text of the role 'assistant', so nothing is learned",
    ),
    "an end in a chat": (
        "chat",
        '{"messages": [{"role": "assistant", "content": "a<|endoftext|>"}]}',
        "would end a document there; name another token with --eod",
    ),
}


@pytest.mark.parametrize(("kind", "line", "message"), WRONG_TEXTS.values(), ids=WRONG_TEXTS)
def test_wrong_texts_are_refused_by_their_place(
    command: PrepareCommand, tmp_path: Path, kind: str, line: str, message: str
) -> None:
    write_tokenizer(tmp_path / "tok", eos=END if kind == "answers" else "<|im_end|>")
    (tmp_path / "x.jsonl").write_text("\n" + line + "\n")
    error = command.refusal("x.jsonl", *Examples(command, kind).options())
    assert error.startswith(f"{tmp_path}/x.jsonl:2: ")
    assert message in error


OPTIONS: dict[str, tuple[list[str], str]] = {
    "template of answers": (
        ["--kind", "answers", "--chat-template", "x"],
        "--chat-template is only used with --kind chat, and this is --kind answers",
    ),
    "prompt of text": (["--prompt-field", "x"], "--prompt-field is only used with --kind answers"),
    "answer of chat": (
        ["--kind", "chat", "--answer-field", "x"],
        "--answer-field is only used with --kind answers, and this is --kind chat",
    ),
    "field of answers": (["--kind", "answers", "--field", "x"], "--field is not used with --kind"),
    "chat of bytes": (["--kind", "chat", "--tokenizer", "bytes"], "--kind chat needs a tokenizer"),
    "end of bytes": (
        ["--kind", "answers", "--tokenizer", "bytes", "--eod", "x"],
        "--eod x is not used with --tokenizer bytes",
    ),
    "no template": (["--kind", "chat"], "has no chat template, neither chat_template.jinja nor"),
    "no such template": (["--kind", "chat", "--chat-template", "none"], "there is no such file"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_wrong_options_are_refused(
    command: PrepareCommand, tmp_path: Path, options: list[str], message: str
) -> None:
    write_tokenizer(tmp_path / "tok", None)
    source = write_chats(tmp_path / "x.jsonl")
    named = [] if "--tokenizer" in options else ["--tokenizer", str(tmp_path / "tok")]
    assert message in command.refusal(source, *options, *named)


def test_examples_are_read_from_jsonl_alone(
    answers: Examples, chats: Examples, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tok", None)
    for kind, name, what in ((answers, "x.txt", "text"), (chats, "x.parquet", "a table")):
        (tmp_path / name).write_text("a")
        error = kind.command.refusal(name, *kind.options())
        assert f"--kind {kind.kind} reads JSONL, and this is {what}" in error


def test_a_tokenizer_of_chats_is_not_trained(command: PrepareCommand, tmp_path: Path) -> None:
    source = write_chats(tmp_path / "x.jsonl")
    error = command.refusal(source, "--train-tokenizer", "300", "--kind", "chat")
    assert "--train-tokenizer is not used with --kind chat" in error


def test_a_tokenizer_that_fails_is_named(chats: Examples, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    content = json.loads((tmp_path / "tok/tokenizer.json").read_text())
    content["model"] = {"type": "WordLevel", "vocab": {END: 0}, "unk_token": "[UNK]"}
    content |= {"added_tokens": [], "pre_tokenizer": None, "post_processor": None}
    (tmp_path / "tok/tokenizer.json").write_text(json.dumps(content))
    error = chats.refusal(CHAT_LINES)
    assert "x.jsonl:1 or soon after: --tokenizer " in error
    assert "UNK" in error


def test_an_old_jinja_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "tok")
    monkeypatch.setattr(chat_settings, "version", lambda name: "3.1.5")
    with refuses(r"needs the package jinja2, 3\.1\.6 or newer, and 3\.1\.5"):
        examples.open_example_tokenizer(str(tmp_path / "tok"), None, examples.Chat())


# What is refused by the process of the tokenizer, with the place of the conversation.
OF_THE_PROCESS: dict[str, tuple[str, str]] = {
    "syntax": ("{% for %}", "the chat template cannot be used: Expected"),
    "an error": (
        "{{ raise_exception('no system\nhere') }}",
        "x.jsonl:1: the chat template fails: no system here",
    ),
    "all memory": ("{{ 'x' * 9999999999 }}", "takes too much memory"),
}


@pytest.mark.parametrize(("template", "message"), OF_THE_PROCESS.values(), ids=OF_THE_PROCESS)
def test_a_hostile_template_is_one_line(
    chats: Examples, tmp_path: Path, template: str, message: str
) -> None:
    write_tokenizer(tmp_path / "tok", template)
    assert message in chats.refusal(CHAT_LINES, "--processes", "1")


HOSTILE: dict[str, tuple[str, str]] = {
    "an error on some turns": (
        "{% if messages | length == 1 %}{{ messages[9].role }}{% endif %}x",
        "the chat template fails on the first 1 messages alone: list object has no",
    ),
    "chance": ("{{ messages | random }}", "No filter named"),
    "changed marks": (
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | upper }}",
        "changes a text after {% generation %} has marked it",
    ),
    "cut marks": (
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x[:-9] }}"
        "{% generation %}b{% endgeneration %}",
        "changes a text after {% generation %} has marked it",
    ),
    "another prompt": (
        PLAIN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>' }}{% endif %}"),
        "does not begin message 2 with what it puts before an answer",
    ),
    "a missing name": ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
    "long output": (
        "{% for a in range(9999) %}" + "x" * 999 + "{% endfor %}",
        "the chat template makes more than 1,048,576",
    ),
    "the class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__['x'] }}", "unsafe"),
    "a change": ("{{ messages.append(1) }}", "unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "another prefix": (
        "{{ messages | length }}" + PLAIN,
        "renders the turns up to message 2 otherwise when others follow",
    ),
    "a tag left open": ("{% generation %}", "Unexpected end of template"),
    "nothing learned": ("{% generation %}{% endgeneration %}x", "nothing is learned"),
}


@pytest.mark.parametrize(("template", "message"), HOSTILE.values(), ids=HOSTILE)
def test_what_a_template_may_not_do(template: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError, TemplateError), match=re.escape(message)):
        ChatTemplate(template, {}).render({"messages": CHATS[0]})


def test_a_template_can_write_no_file_and_has_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the sandbox had a hole, the process still could not fill a file, nor run for ever."""
    monkeypatch.setattr(tokenizer, "_ENCODE_S_PER_MB", 1e9)  # so that the limit tells the request
    write_tokenizer(tmp_path / "tok", "{{ raise_exception('no') }}")
    chat = examples.open_example_tokenizer(str(tmp_path / "tok"), None, examples.Chat())
    try:
        text = json.dumps({"messages": CHATS[0]}).encode()
        with refuses("x:1: the chat template fails: no"):
            chat.encode([Document("x:1", text, len(text))])
        pid = chat._worker._process.pid
        limits = Path(f"/proc/{pid}/limits").read_text()
    finally:
        chat.close()
    soft = {line[:26].strip(): line[26:].split()[0] for line in limits.splitlines()}
    assert soft["Max file size"] == "0"
    assert 1000 * len(text) < int(soft["Max cpu time"]) < 1000 * (len(text) + 100)


def test_marks_may_be_nested_and_filtered() -> None:
    template = ChatTemplate(
        "{% set x %} {% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %} "
        "{% endset %}{{ x | trim }}{{ messages[0].role }}",
        {},
    )
    text, spans = template.render({"messages": [{"role": chat_template.ASSISTANT}]})
    assert (text, spans) == ("abassistant", [(0, 2)])
