"""Builds the pages and a reference of the library as a web site: ``bash tools/site/build [OUT]``.

The pages are those of the repository, README.md first. ``pages`` copies them into a folder, makes
the reference of the public names and ``llms.txt``, and Sphinx makes HTML of it, with a search. A
link that leads nowhere is an error.
"""
