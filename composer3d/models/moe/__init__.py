"""Llama with mixtures of experts: its shape, module, sharding plan, counts and names.

Attention, norms, embedding and head are those of ``models.llama``.
"""
