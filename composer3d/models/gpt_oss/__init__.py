"""gpt-oss: experts with biases and a clamped gate, and attention with sinks.

``models.moe`` and ``models.llama`` have the rest.
"""
