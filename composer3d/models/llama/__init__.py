"""The Llama architecture, which Mistral, Qwen 2 and Qwen 3 share.

``shape`` (sizes and presets), ``counts`` (parameters and FLOPs) and ``huggingface`` (config.json)
need no torch. ``model`` is the decoder, and ``plan`` is its sharding plan. ``names`` translates the
names of parameters to other formats. Nothing is imported here, so that a shape can be read without
torch.
"""
