"""One module for each command of ``composer3d``: its options, and the function that runs it.

``registry`` lists the commands, and says what a module has.
"""
