"""composer3d: compose parallelisms for Llama-style models in plain PyTorch, and prove each composition exact."""

__version__ = "0.1.0"
