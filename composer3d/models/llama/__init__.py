"""The Llama architecture, also that of Mistral, Qwen 2 and Qwen 3: everything that belongs to it.

``shape`` (sizes and presets), ``counts`` (parameters and FLOPs) and ``huggingface`` (config.json)
need no torch. ``model`` and ``plan`` are composed. ``names`` has the names in other formats.
Nothing is imported here, so that a shape can be read without torch.
"""
