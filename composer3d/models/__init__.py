"""Models: the contract every architecture keeps, the registry of architectures, shared layers, and a folder for each.

Nothing is imported here, so that a shape can be read without torch.
"""
