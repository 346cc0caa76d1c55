"""One module for each command of ``composer3d``: from parsed arguments to an exit status.

``cli`` has the parser, and imports the module of a command when it runs.
"""
