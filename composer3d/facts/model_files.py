"""The names of the files that belong to a model in Hugging Face format but hold no weights."""

import re

# The default chat template of a tokenizer, and the folder of further ones: NAME.jinja.
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = "additional_chat_templates"

# Files with the vocabulary of a tokenizer, besides tokenizer.json.
VOCABULARY_NAMES = (
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
# The files of a tokenizer, besides further chat templates.
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    *VOCABULARY_NAMES,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
)
# The files in the repositories of Llama, Mistral and Qwen at Hugging Face and at Meta.
CARRIED_NAMES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_NAMES,
    "README.md",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)

_CHAT_TEMPLATE_PATH = re.compile(rf"{CHAT_TEMPLATES}/[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}\.jinja")


def is_of_tokenizer(path: str) -> bool:
    """Return whether a path in the folder of a model is that of a file of its tokenizer."""
    return path in TOKENIZER_NAMES or _CHAT_TEMPLATE_PATH.fullmatch(path) is not None


def is_carried(path: str) -> bool:
    """Return whether a path in the folder of a model is that of a file that belongs to it."""
    return path in CARRIED_NAMES or is_of_tokenizer(path)
