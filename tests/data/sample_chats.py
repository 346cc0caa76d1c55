"""A small tokenizer folder with a chat template, and conversations."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from tests.data.conftest import train_bpe

END = "<|endoftext|>"
SPECIAL = [END, "<|im_start|>", "<|im_end|>", "<s>"]
TEXT = "hello there friend, what is the weather? it is sunny and warm today. and then?"

# The same text: the first marks what is learned, the second does not.
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

CHATS: list[list[dict[str, Any]]] = [
    [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "it is warm 😀 日本"},
        {"role": "user", "content": "and then?", "name": None},
        {"role": "assistant", "content": "sunny"},
    ],
    [
        {"role": "system", "content": "friend <|im_end|> x"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": " hello \n"},
    ],
    [{"role": "assistant", "content": "warm"}, {"role": "user", "content": "today"}],
]


def write_tokenizer(
    folder: Path, template: str | None = MARKED, eos: str = "<|im_end|>"
) -> Tokenizer:
    """Write the tokenizer, and a configuration with which it ends a text with ``eos``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_train())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": eos,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_str(_train())


@cache
def _train() -> str:
    """Train a tokenizer of about 300 tokens that begins a text with <s>."""
    coder = train_bpe([TEXT] * 3, size=310, special=SPECIAL)
    coder.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", coder.token_to_id("<s>"))]
    )
    text: str = coder.to_str()
    return text


def write_lines(file: Path, entries: list[Any]) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def write_chats(file: Path) -> Path:
    return write_lines(file, [{"id": 7, "messages": chat} for chat in CHATS])
