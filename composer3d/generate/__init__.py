"""Text and losses from any checkpoint: generation with a cache of keys and values, evaluation."""
