"""Write the tables of docs/coming_from_elsewhere.md: ``python -m tools.words_page``.

They are those that ``composer3d.imports.words`` reads, which the translation itself uses. A test
compares the page with them.
"""

import re
from pathlib import Path

from composer3d.imports.words import OFF, PROGRAMS, Word

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming_from_elsewhere.md"


def spelled(program: str, name: str) -> str:
    """Return a word as the files of its program spell it."""
    if program == "Megatron-LM":
        return f"`--{name.replace('_', '-')}`"
    if program == "torchtitan" and "." in name and not name.startswith("model_spec."):
        table, _, key = name.partition(".")
        return f"`[{table}] {key}`"
    if program in ("nanotron", "NeMo Automodel"):
        return f"`{name.replace('.', ': ')}`"
    return f"`{name}`"


def tables(program: str) -> str:
    """Return the tables of a program: words with an equal, without one, and those that are open."""
    words = PROGRAMS[program].words
    lines = ["| theirs | ours | how |", "|---|---|---|"]
    lines += [_row(program, word) for word in words if word.ours]
    for decides, title in (
        (False, "theirs, with no key of ours | what happens"),
        (True, "theirs, an open point | why"),
    ):
        by_note: dict[str, list[str]] = {}
        for word in words:
            if not word.ours and word.decides is decides:
                by_note.setdefault(word.note + _fits(word), []).append(spelled(program, word.name))
        if by_note:
            lines += ["", f"| {title} |", "|---|---|"]
            lines += [f"| {', '.join(names)} | {note} |" for note, names in by_note.items()]
    return "\n".join(lines)


def _fits(word: Word) -> str:
    """Return the values of an open point with which it is none, for its note."""
    values = [value for value in word.fits if value not in (*OFF, "*")]
    return f" (not with {', '.join(values)})" if word.decides and values else ""


def _row(program: str, word: Word) -> str:
    ours = ", ".join(f"`{key.strip()}`" for key in word.ours.split(","))
    how = word.note
    if word.values:
        choices = ", ".join(f"{theirs}: {value}" for theirs, value in word.values.items())
        how = f"{how}; {choices}" if how else choices
    return f"| {spelled(program, word.name)} | {ours} | {how or 'as it is'} |"


def page(text: str) -> str:
    """Return the text of the page with the tables of the code between its markers.

    Raises:
        ValueError: the page lacks the markers of a program.
    """
    for program in PROGRAMS:
        begin, end = f"<!-- {program}: begin -->", f"<!-- {program}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the page lacks {begin} and {end}")
        block = f"{begin}\n{tables(program)}\n{end}"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
