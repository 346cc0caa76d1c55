"""gpt-oss: experts with biases and a clamped gate, attention with sinks, every second block windowed.

``models.moe`` and ``models.llama`` have the rest.
"""
