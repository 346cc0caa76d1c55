"""One module for each command of ``composer3d``.

Its function ``run`` takes the parsed arguments and returns the exit status. ``cli`` has the parser,
and imports the module of a command only when that command runs.
"""
