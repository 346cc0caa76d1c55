"""Plain reference code, which judges the package and shares no code with it.

It is written from the papers, for clarity and not for speed. Tests and ``tools/prove`` compare with
it. Of the package it reads only the shapes of models; ``llama.compare`` also runs the model that it
judges.
"""
