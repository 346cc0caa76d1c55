"""Lines of examples in the forms of other tools: what is read of them, and what is refused."""

from typing import Any

import pytest

from composer3d.data.example_lines import hint_of, read_conversation, read_pair
from composer3d.facts.errors import DataError


def user(content: Any = "a", **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def assistant(content: Any = "b", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ALPACA = {"instruction": "a", "input": "", "output": "b"}
TEXTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]

# The line, its messages, and the numbers of those that are not learned.
CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[int]]] = {
    "plain": ({"messages": [user(), assistant()]}, [user(), assistant()], []),
    "null": ({"messages": [user(name=None), assistant(weight=None)]}, [user(), assistant()], []),
    "weights": (
        {"messages": [user(), assistant(weight=0), user(weight=1), assistant(weight=1.0)]},
        [user(), assistant(), user(), assistant()],
        [1],
    ),
    "a masked question": (
        {"messages": [user(train=False), assistant()]},
        [user(), assistant()],
        [],
    ),
    "a learned line": (
        {"messages": [user(), assistant()], "train": True},
        [user(), assistant()],
        [],
    ),
    "about a line": ({"messages": [user()], "training_set": "x", "id": 7}, [user()], []),
    "parts": (
        {"messages": [user(TEXTS), assistant(TEXTS[:1])]},
        [user("a b"), assistant("a ")],
        [],
    ),
    "calls": (
        {"messages": [assistant(None, tool_calls=[{"name": "f"}])]},
        [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
        [],
    ),
    "ShareGPT": ({"conversations": SHARED}, [user(), assistant()], []),
    "ShareGPT by its key": ({"messages": SHARED}, [user(), assistant()], []),
    "ShareGPT in full": (
        {
            "system": "s",
            "conversations": [
                *SHARED,
                {"from": "observation", "value": "c"},
                {"from": "assistant", "value": "d", "weight": 0},
            ],
        },
        [
            {"role": "system", "content": "s"},
            user(),
            assistant(),
            {"role": "tool", "content": "c"},
            assistant("d"),
        ],
        [4],
    ),
    "one system": (
        {"system": "s", "messages": [{"role": "system", "content": "s"}, assistant()]},
        [{"role": "system", "content": "s"}, assistant()],
        [],
    ),
    "Alpaca": (ALPACA, [user(), assistant()], []),
    "Alpaca in full": (
        ALPACA | {"input": "i", "system": "s", "history": [["q", "r"]], "weight": 0},
        [
            {"role": "system", "content": "s"},
            user("q"),
            assistant("r"),
            user("a\ni"),
            assistant(),
        ],
        [0, 1, 2, 3, 4],
    ),
}


@pytest.mark.parametrize(("line", "messages", "silent"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations(
    line: dict[str, Any], messages: list[dict[str, Any]], silent: list[int]
) -> None:
    assert read_conversation(line, "messages", "x:1") == (messages, None, silent, {})


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss", "learn"])
@pytest.mark.parametrize("value", [False, 0, 0.0], ids=str)
def test_a_turn_or_a_line_that_says_so_is_not_learned(key: str, value: Any) -> None:
    for name, no in ((key, value), ("learned", value), ("mask", not value), ("masked", 1)):
        of_a_turn = {"messages": [user(), assistant(**{name: no})]}
        of_a_line = {"messages": [user(), assistant()], name: no}
        for line, silent in ((of_a_turn, [1]), (of_a_line, [0, 1])):
            found = read_conversation(line, "messages", "x:1")
            assert found == ([user(), assistant()], None, silent, {})


# The chosen conversation of a line of preferences, by --field chosen.
CHOSEN: dict[str, dict[str, Any]] = {
    "whole": {"chosen": [user(), assistant()]},
    "its prompt apart": {"chosen": [assistant()], "prompt": [user()]},
    "its prompt as well": {"chosen": [user(), assistant()], "prompt": [user()]},
    "its prompt as a text": {"chosen": [assistant()], "prompt": "a"},
}


@pytest.mark.parametrize("line", CHOSEN.values(), ids=CHOSEN)
def test_the_chosen_conversation_has_its_prompt(line: dict[str, Any]) -> None:
    found = read_conversation({**line, "rejected": [assistant("c")]}, "chosen", "x:1")
    assert found.messages == [user(), assistant()]


def test_tools_may_be_a_text() -> None:
    for tools, expected in (('[{"name": "f"}]', [{"name": "f"}]), (" ", None), ([], [])):
        line = {"messages": [assistant()], "tools": tools}
        assert read_conversation(line, "messages", "x:1").tools == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "half a weight": (
        {"messages": [user(), assistant(weight=0.5)]},
        'message 2 has "weight": 0.5, and only 0, 1, false and true are understood',
    ),
    "a weight as a text": ({"messages": [assistant(train="false")]}, '"train": "false"'),
    "a weight of a line": ({"messages": [assistant()], "weight": 2}, 'it has "weight": 2'),
    "an unknown weight": (
        {"messages": [assistant(lossWeight=0)]},
        'message 1 has "lossWeight", which seems to say what is learned and is not understood',
    ),
    "a detail": ({"messages": [assistant(train_detail=[])]}, 'has "train_detail", which seems'),
    "an unknown weight of a line": (
        {"messages": [assistant()], "loss_mask": [0, 1]},
        'it has "loss_mask", which seems',
    ),
    "two that differ": (
        {"messages": [assistant(weight=1, masked=True)]},
        'message 1 has "weight" and "masked", which contradict each other; keep one',
    ),
    "a learned question": (
        {"messages": [user(train=True), assistant()]},
        'message 1 has "train": true, and is of the role "user"; only turns of the role assistant',
    ),
    "a weight of a part": (
        {"messages": [assistant([{"type": "text", "text": "a", "weight": 0}])]},
        'message 1: part 1 of its content has "weight", and only whole messages',
    ),
    "a label": ({"messages": [assistant()], "label": False}, 'it has a "label", as lines of pref'),
    "an image": (
        {"messages": [user([TEXTS[0], {"type": "image_url", "image_url": "x"}])]},
        'message 1: part 2 of its content is "image_url", and only parts such as',
    ),
    "a call": ({"messages": [assistant([{"type": "tool_use"}])]}, 'part 1 of its content is "tool'),
    "a bare part": ({"messages": [user(["a"])]}, 'part 1 of its content is "a"'),
    "images beside": ({"conversations": SHARED, "images": ["x.png"]}, 'it has "images", and only'),
    "images of a turn": ({"messages": [user(image="x.png")]}, 'message 1 has "image", and only'),
    "a strange role": (
        {"conversations": [{"from": "\u202e", "value": "a"}]},
        'message 1 is from "\\u202e"; the roles that are read are human, user, gpt,',
    ),
    "no message": ({"messages": [7]}, "message 1 is no object"),
    "no content": ({"messages": [user(), {"role": "user"}]}, "message 2 has no role or content"),
    "two systems": (
        {"messages": [{"role": "system", "content": "a"}], "system": "b"},
        'the key "system" and the first message are two system prompts; keep one',
    ),
    "a number as system": ({"messages": [user()], "system": 7}, 'the key "system" has a content'),
    "tools that are none": (
        {"messages": [user()], "tools": "x"},
        'its "tools" is "x", and must be',
    ),
    "variables that are none": (
        {"messages": [user()], "chat_template_kwargs": [1]},
        'its "chat_template_kwargs" must be an object',
    ),
    "a variable that is set": (
        {"messages": [user()], "chat_template_kwargs": {"tools": []}},
        'its "chat_template_kwargs" has "tools", which prepare sets; remove it there',
    ),
    "Alpaca of numbers": (ALPACA | {"output": 7}, 'its "output" is 7, and must be a text'),
    "Alpaca's history": (ALPACA | {"history": [["a"]]}, 'its "history" must be a list of pairs'),
    "preferences": (
        {"prompt": "a", "chosen": [user()], "rejected": []},
        "preferences, which are not learned as such: --kind chat --field chosen learns",
    ),
    "preferences of texts": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "--kind answers --answer-field chosen learns the chosen answer",
    ),
    "an answer": ({"prompt": "a", "completion": "b"}, "--kind answers --answer-field completion"),
}


@pytest.mark.parametrize(("line", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_named(line: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_conversation(line, "messages", "x:1")
    (text,) = caught.value.lines
    assert text.startswith("x:1: ")
    assert message in text
    assert text.isprintable()


def test_pairs() -> None:
    assert read_pair({"prompt": "a", "answer": "b"}, "prompt", "answer", "x:1") == ("a", "b", True)
    line = {"q": "a", "train": "b", "weight": 0}
    assert read_pair(line, "q", "train", "x:1") == ("a", "b", False)
    prompt, answer, learned = read_pair(ALPACA, "prompt", "answer", "x:1")
    assert (answer, learned) == ("b", True)
    assert prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\na\n\n### Response:"
    )
    prompt, _, _ = read_pair(ALPACA | {"input": "c"}, "prompt", "answer", "x:1")
    assert prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "a\n\n### Input:\nc\n\n### Response:"
    )


WRONG_PAIRS: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "a history": (ALPACA | {"history": [["a", "b"]]}, ("prompt", "answer"), "only --kind chat"),
    "a system text beside": (
        ALPACA | {"system": "In one word."},
        ("instruction", "output"),
        'it has "system", which only --kind chat reads',
    ),
    "an input beside": (
        ALPACA | {"input": "c"},
        ("instruction", "output"),
        'it has an "input" beside the prompt',
    ),
    "a weight": ({"prompt": "a", "answer": "b", "loss": 0.3}, ("prompt", "answer"), '"loss": 0.3'),
    "KTO": ({"prompt": "a", "completion": "b", "label": False}, ("prompt", "completion"), "KTO"),
    "preferences": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        ("prompt", "answer"),
        "--answer-field chosen",
    ),
    "messages": ({"messages": []}, ("prompt", "answer"), "--kind chat --field messages reads them"),
}


@pytest.mark.parametrize(("line", "keys", "message"), WRONG_PAIRS.values(), ids=WRONG_PAIRS)
def test_wrong_pairs_are_named(line: dict[str, Any], keys: tuple[str, str], message: str) -> None:
    with pytest.raises(DataError, match=r"^x:1: ") as caught:
        read_pair(line, *keys, "x:1")
    assert message in caught.value.lines[0]


def test_nothing_is_said_of_an_unknown_line() -> None:
    assert hint_of({"body": "a"}) == ""
