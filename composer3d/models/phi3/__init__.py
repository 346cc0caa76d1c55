"""Phi-3 and Phi-4: Llamas whose files join projections that read the same input.

``models.llama`` has the rest.
"""
