"""What one hour with a GPU has to show, as parts that can each be repeated alone.

``python -m tools.gpu run --out FOLDER`` runs all parts, and ``run NAME ...`` some. Each part is a
process with a limit, and leaves ``NAME.json`` in the folder, also if it failed or had no more time.
``python -m tools.gpu page`` writes ``docs/gpu.md`` from ``results``, where those to keep are put.

``--rehearse`` runs the same code on a CPU with tiny sizes, so that no minute of a GPU is lost to a
mistake.
"""
