"""Granite 3: a Llama with multipliers of the embedding, the scores, the layers and the logits.

``models.llama`` has the rest.
"""
