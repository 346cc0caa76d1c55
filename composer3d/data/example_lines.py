"""Read the lines of files of examples, in the forms that other tools write them in.

A line of JSONL is checked here before anything is made of it, and every error names its place.
What would change which tokens are learned is honoured or refused, never ignored.
"""

import json
import re
from typing import Any, NamedTuple, NoReturn

from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line, short_json

ASSISTANT = "assistant"  # chat_template has it too: it imports nothing

# The key that ``prepare`` adds to a conversation: the numbers of messages that are not learned.
SILENT = "silent"

# The key of a line with further variables of the chat template, such as enable_thinking.
_VARIABLES = "chat_template_kwargs"

# The roles of ShareGPT, in the words of chat templates.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

# Keys of a message or of a line that say whether it is learned: true for yes, or true for no.
_LEARNS = ("weight", "train", "training", "trainable", "loss", "learn", "learned")
_MASKS = ("mask", "masked")
# Any other key with one of these words may say so too, in a way that is not understood.
_WORDS = {*_LEARNS, *_MASKS, "weights", "trained", "losses", "learning", "masks", "masking"}

# What an example may refer to besides its texts. A model of text cannot learn it.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")

# The prompts of Stanford Alpaca.
_ALPACA_INTRODUCTION = "Below is an instruction that describes a task"
_ALPACA_REQUEST = ". Write a response that appropriately completes the request.\n\n"
_ALPACA_CONTEXT = ", paired with an input that provides further context"


class Pair(NamedTuple):
    """A prompt and its answer. An answer that is not ``learned`` is input, like the prompt."""

    prompt: str
    answer: str
    learned: bool = True


class Conversation(NamedTuple):
    """A conversation.

    Attributes:
        messages: dicts with a ``role``, a ``content`` and what else a chat template may read.
        tools: for the template; None if there are none.
        silent: the numbers of the assistant's messages that are not learned, from 0; those of all
            messages if the line says that it is not learned.
        variables: others for the template.
    """

    messages: list[dict[str, Any]]
    tools: Any
    silent: list[int]
    variables: dict[str, Any]


def read_object(line: bytes, place: str, wanted: str) -> dict[str, Any]:
    """Return the object on a line.

    Raises DataError, which names ``place`` and shows ``wanted``, a right line.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        _refuse_line(place, wanted, one_line(error, 300))
    if not isinstance(entry, dict):
        _refuse_line(place, wanted, "the line is no object")
    return entry


def read_pair(entry: dict[str, Any], prompt: str, answer: str, place: str) -> Pair:
    """Return the prompt and the answer of a line. A line of Alpaca needs no names of keys.

    Args:
        entry: the object on the line.
        prompt: the key of the prompt.
        answer: the key of the answer.
        place: of the line, for messages.

    Raises:
        DataError: a text is missing, or the line has something that is not understood.
    """
    texts = [entry.get(prompt), entry.get(answer)]
    if _is_alpaca(entry) and (prompt, answer) != ("instruction", "output") and None in texts:
        instruction, context, output = _read_alpaca(entry, place)
        _refuse_chat_of_alpaca(entry, place)
        prompt_text = f"{_ALPACA_INTRODUCTION}{_ALPACA_CONTEXT if context else ''}{_ALPACA_REQUEST}"
        prompt_text += f"### Instruction:\n{instruction}\n\n"
        prompt_text += f"### Input:\n{context}\n\n### Response:" if context else "### Response:"
        texts = [prompt_text, output]
    elif _is_alpaca(entry) and prompt == "instruction":
        _refuse_chat_of_alpaca(entry, place)
        if entry.get("input"):
            _refuse(
                place,
                'it has an "input" beside the prompt; leave --prompt-field and --answer-field out '
                "to read it as Alpaca's, or join the two",
            )
    if not all(isinstance(text, str) for text in texts):
        wanted = f'{{"{one_line(prompt)}": "...", "{one_line(answer)}": "..."}}'
        problem = (
            "a key is missing or is no text; --prompt-field and --answer-field name other keys"
        )
        _refuse_line(place, wanted, problem + hint_of(entry))
    _refuse_media(entry, place, (prompt, answer))
    learned = _is_learned(entry, place, "it", own=(prompt, answer), is_line=True)
    return Pair(str(texts[0]), str(texts[1]), learned is not False)


def _refuse_chat_of_alpaca(entry: dict[str, Any], place: str) -> None:
    """Raise DataError if a line of Alpaca has other messages beside its prompt and its answer."""
    for key in ("system", "history"):
        if entry.get(key):
            _refuse(place, f"it has {short_json(key)}, which only --kind chat reads; use it")


def read_conversation(entry: dict[str, Any], key: str, place: str) -> Conversation:
    """Return the conversation of a line: of messages, of ShareGPT or of Alpaca.

    Args:
        entry: the object on the line.
        key: the key of the messages.
        place: of the line, for messages.

    Raises:
        DataError: there are no messages, or the line has something that is not understood.
    """
    found = entry.get(key)
    if found is None and isinstance(entry.get("conversations"), list):
        key, found = "conversations", entry["conversations"]
    elif found is None and _is_alpaca(entry):
        found = _alpaca_messages(entry, place)
    if not isinstance(found, list):
        wanted = f'{{"{one_line(key)}": [{{"role": "...", "content": "..."}}, ...]}}'
        problem = "the key is missing or is no list; --field names another key"
        _refuse_line(place, wanted, problem + hint_of(entry))
    found = [*_prompt_apart(entry, key, found), *found]

    messages, silent = [], []
    for number, value in enumerate(found):
        message, learned = _read_message(value, place, f"message {number + 1}")
        messages.append(message)
        if learned is False and message["role"] == ASSISTANT:
            silent.append(number)
    system = _join_parts(entry.get("system"), place, 'the key "system"')
    if system:
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
            silent = [number + 1 for number in silent]
        elif messages[0].get("content") != system:
            _refuse(
                place, 'the key "system" and the first message are two system prompts; keep one'
            )
    _refuse_media(entry, place, (key,))
    if _is_learned(entry, place, "it", own=(key,), is_line=True) is False:
        silent = list(range(len(messages)))
    tools, variables = _read_tools(entry.get("tools"), place), _read_variables(entry, place)
    return Conversation(messages, tools, silent, variables)


def turns_of(messages: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the messages of the assistant."""
    return [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]


def hint_of(entry: dict[str, Any]) -> str:
    """Return how ``prepare`` reads a line without the wanted key, or "" if that is unknown."""
    if "chosen" in entry and "rejected" in entry:
        way = (
            "--kind chat --field chosen learns the chosen conversation"
            if isinstance(entry["chosen"], list)
            else "--kind answers --answer-field chosen learns the chosen answer"
        )
        return f"; this is a line of preferences, which are not learned as such: {way}"
    for key in ("messages", "conversations"):
        if isinstance(entry.get(key), list):
            return f"; it has {key}: --kind chat --field {key} reads them"
    if _is_alpaca(entry):
        return "; this is a line of Alpaca: --kind chat and --kind answers read it"
    if "prompt" in entry and isinstance(entry.get("completion"), str):
        return "; it has a completion: --kind answers --answer-field completion reads it"
    return ""


def _read_message(value: Any, place: str, where: str) -> tuple[dict[str, Any], bool | None]:
    """Return a message in the words of chat templates, and whether it says that it is learned."""
    if not isinstance(value, dict):
        _refuse(place, f"{where} is no object")
    # Like transformers: a template cannot tell a key with null from one that is absent.
    message = {key: item for key, item in value.items() if item is not None}
    if "from" in message and "value" in message and not {"role", "content"} & message.keys():
        role = message.pop("from")
        if not isinstance(role, str) or role not in _ROLES:
            known = ", ".join(_ROLES)
            _refuse(
                place, f"{where} is from {short_json(role)}; the roles that are read are {known}"
            )
        message = {"role": _ROLES[role], "content": message.pop("value"), **message}
    content = message.get("content")
    calls_tools = content is None and isinstance(message.get("tool_calls"), list)
    if not isinstance(message.get("role"), str) or not (
        calls_tools or isinstance(content, str) or (isinstance(content, list) and content)
    ):
        _refuse(
            place,
            f'{where} has no role or content; give {{"role": "...", "content": "..."}}, or '
            '{"from": "...", "value": "..."}',
        )
    if content is not None:
        message["content"] = _join_parts(content, place, where)
    _refuse_media(message, place, (), where)
    learned = _is_learned(message, place, where)
    said = [key for key in message if key in (*_LEARNS, *_MASKS)]
    if learned and message["role"] != ASSISTANT and said != ["weight"]:
        _refuse(
            place,
            f"{where} has {short_json(said[0])}: {short_json(message[said[0]])}, and is of the "
            f"role {short_json(message['role'])}; only turns of the role {ASSISTANT} can be "
            "learned; remove the key",
        )
    return {key: item for key, item in message.items() if key not in said}, learned


def _is_learned(
    entry: dict[str, Any],
    place: str,
    where: str,
    *,
    own: tuple[str, ...] = (),
    is_line: bool = False,
) -> bool | None:
    """Return whether a message or a line says that it is learned; None if it does not say.

    Args:
        entry: the message or the line.
        place: of the line, for messages.
        where: what has the key, for messages.
        own: keys that mean something else.
        is_line: whether it is a line. Its similar keys with a text say what the line is about.

    Raises:
        DataError: a key is not understood, or two contradict each other.
    """
    verdicts = {}
    for key, value in entry.items():
        if value is None or key in own:
            continue
        if key in _LEARNS or key in _MASKS:
            # 0.0 and 1.0 equal false and true.
            if type(value) not in (bool, int, float) or value not in (0, 1):
                _refuse(
                    place,
                    f"{where} has {short_json(key)}: {short_json(value)}, and only 0, 1, false and "
                    "true are understood; give one of them, or remove the key",
                )
            verdicts[key] = bool(value) == (key in _LEARNS)
        elif _words(key) & _WORDS and not (is_line and isinstance(value, str)):
            _refuse(
                place,
                f"{where} has {short_json(key)}, which seems to say what is learned and is not "
                'understood; say it with "train": false or "weight": 0, or remove or rename the '
                "key",
            )
    if len(set(verdicts.values())) > 1:
        names = " and ".join(map(short_json, verdicts))
        _refuse(place, f"{where} has {names}, which contradict each other; keep one")
    if type(entry.get("label")) is bool and is_line and "label" not in own:
        _refuse(
            place,
            'it has a "label", as lines of preferences (KTO) have; keep the lines whose label is '
            "true, and remove the key",
        )
    return next(iter(verdicts.values()), None)


def _words(key: str) -> set[str]:
    """Return the words of a key, which may be joined by signs or by capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key)}


def _join_parts(content: Any, place: str, where: str) -> str:
    """Return a content as one text: its parts, if they are texts, are joined as they are."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        _refuse(place, f"{where} has a content that is no text: {short_json(content)}")
    texts = []
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            _refuse(
                place,
                f"{where}: part {number} of its content is {short_json(kind)}, and only parts such "
                'as {"type": "text", "text": "..."} are read; remove the part or the example',
            )
        for key, value in part.items():
            if value is not None and _words(key) & _WORDS:
                _refuse(
                    place,
                    f"{where}: part {number} of its content has {short_json(key)}, and only whole "
                    "messages can be left unlearned; move the key to the message",
                )
        texts.append(part["text"])
    return "".join(texts)


def _prompt_apart(entry: dict[str, Any], key: str, messages: list[Any]) -> list[Any]:
    """Return the messages of the prompt, if a line of preferences has them apart."""
    prompt = entry.get("prompt")
    if key not in ("chosen", "rejected", "completion") or not prompt:
        return []
    if isinstance(prompt, list):
        return [] if messages[: len(prompt)] == prompt else prompt
    first = messages[0] if messages else None
    if isinstance(prompt, str) and isinstance(first, dict) and first.get("role") == ASSISTANT:
        return [{"role": "user", "content": prompt}]
    return []


def _is_alpaca(entry: dict[str, Any]) -> bool:
    return "instruction" in entry and "output" in entry


def _read_alpaca(entry: dict[str, Any], place: str) -> tuple[str, str, str]:
    """Return the instruction, the input and the output of a line of Alpaca."""
    texts = [entry["instruction"], entry.get("input") or "", entry["output"]]
    for key, text in zip(("instruction", "input", "output"), texts, strict=True):
        if not isinstance(text, str):
            _refuse(place, f"its {short_json(key)} is {short_json(text)}, and must be a text")
    return texts[0], texts[1], texts[2]


def _alpaca_messages(entry: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Return a line of Alpaca as messages: the instruction and the input are one question."""
    instruction, context, output = _read_alpaca(entry, place)
    turns = entry.get("history") or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in turns
    ):
        _refuse(place, 'its "history" must be a list of pairs: [["question", "answer"], ...]')
    question = f"{instruction}\n{context}" if context and instruction else instruction or context
    return [
        {"role": role, "content": text}
        for turn in (*turns, (question, output))
        for role, text in zip(("user", ASSISTANT), turn, strict=True)
    ]


def _read_tools(tools: Any, place: str) -> Any:
    """Return the tools of a line. Some files have them as JSON in a text."""
    if not isinstance(tools, str):
        return tools
    if not tools.strip():
        return None
    try:
        found = json.loads(tools)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        _refuse(place, f'its "tools" is {short_json(tools)}, and must be a list')
    return found


def _read_variables(entry: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the variables that a line has for the chat template, besides the usual ones."""
    variables = entry.get(_VARIABLES)
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        _refuse(place, f"its {short_json(_VARIABLES)} must be an object; correct or remove it")
    for name in ("messages", "tools", "add_generation_prompt", SILENT):
        if name in variables:
            _refuse(
                place,
                f"its {short_json(_VARIABLES)} has {short_json(name)}, which prepare sets; "
                "remove it there",
            )
    return variables


def _refuse_media(
    entry: dict[str, Any], place: str, own: tuple[str, ...], where: str = "it"
) -> None:
    for key in _MEDIA:
        if entry.get(key) and key not in own:
            _refuse(
                place,
                f"{where} has {short_json(key)}, and only texts are learned; remove the example, "
                "or rename the key",
            )


def _refuse(place: str, problem: str) -> NoReturn:
    raise DataError(f"{place}: {problem}")


def _refuse_line(place: str, wanted: str, problem: str) -> NoReturn:
    raise DataError(f"{place}: must be a JSON object such as {wanted}: {problem}")
