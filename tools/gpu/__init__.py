"""What one hour with a GPU has to show, as parts that can each be repeated alone.

``python -m tools.gpu run --out FOLDER`` runs all parts, and ``run NAME ...`` some. Each part is a
process with a limit, and leaves ``NAME.json`` in the folder, also if it failed or had no more time.
``python -m tools.gpu page FOLDER`` writes ``docs/gpu.md`` from them.

``--rehearse`` runs the same code on a CPU with tiny sizes, so that no minute of a GPU is lost to a
mistake. On torch 2.11, all but ``host`` and ``tests`` run as well: see ``old_torch``.
"""
