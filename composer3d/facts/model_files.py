"""The names of the files that belong to a model in Hugging Face format but hold no weights."""

# The files of a tokenizer.
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# The files in the repositories of Llama, Mistral and Qwen at Hugging Face and at Meta.
CARRIED_NAMES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_NAMES,
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)
