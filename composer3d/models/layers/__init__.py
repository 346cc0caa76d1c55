"""Layers that architectures share: single-device code that knows no mesh and no recipe."""
