"""Gemma 3: a decoder with norms before and after its layers, and two rotary bases.

``models.llama`` has the rest.
"""
