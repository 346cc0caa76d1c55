"""Models: the contract, the registry, shared layers, and a folder for each architecture.

Nothing is imported here, so that a shape can be read without torch.
"""
