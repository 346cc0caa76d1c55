"""Read shell scripts as text: variables, arrays, here-documents and options. Nothing runs.

Of the language of shells, assignments and the words of commands are understood. A condition that
compares known texts is decided. Under any other condition, a variable that has a value keeps it,
and the user is told.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from composer3d.imports.literal import arithmetic
from composer3d.recipe.values import one_line
from composer3d.spec.errors import RecipeError

_MOST_CHARACTERS = 1 << 16  # of an expanded word: A=$A$A doubles with each line
_MOST_NESTED = 200  # characters of arithmetic, or of a default value: both may nest
_MOST_TOTAL = 1 << 22  # of all expanded words together

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")

_REFERENCE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*|[0-9])(?P<array>\[[@*]\])?"
    r"(?P<default>:?[-=].*)?\})",
    re.DOTALL,
)
_HERE = re.compile(r"<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w*)\2")
_REDIRECTION = re.compile(r"(?:<<<|&>{1,2}|[<>]{1,2}[&|]?)[ \t]*")
_REDIRECTED = re.compile(r"(?:&>{1,2}|[0-9]?>{1,2}&?)")
_KEYWORDS = frozenset(("then", "do", "done", "{", "}", "!", "time", "exec", "for"))
_DECLARING = frozenset(("export", "local", "readonly", "declare", "typeset"))


class _Part(NamedTuple):
    """A piece of a word: its text, whether variables in it count, and whether it is quoted."""

    text: str
    expands: bool
    is_quoted: bool


# A word is a list of parts, or the elements of an array.
_Word = list[_Part]


class _Statement(NamedTuple):
    line: int
    words: "list[_Word]"
    array: "list[_Word] | None"  # the elements, if the last word is NAME=( or NAME+=(
    end: str  # what ended it: a line break, ; & && | || ( ) or nothing


class Command(NamedTuple):
    """One command of a script, with all variables expanded.

    Attributes:
        line: its first line, from 1.
        words: its words. What could not be expanded stands as it is, with its ``$``.
    """

    line: int
    words: list[str]


@dataclass
class Script:
    """What a script says.

    Attributes:
        commands: its commands, in order.
        variables: the words of each variable at the end.
        documents: the texts of here-documents, with variables expanded, by line.
        undecided: a line for each assignment that depends on a condition and was not made.
    """

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    documents: list[tuple[int, str]] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)


def read_script(text: str, name: str, *, takes_branches: bool = False) -> Script:
    """Read the text of a shell script.

    Args:
        text: the script, at most as long as ``source`` allows.
        name: the file, for messages.
        takes_branches: whether a variable that is set again under a condition that is not decided
            has its new value. By default it keeps the one before.

    Raises:
        RecipeError: variables expand to too much text.
    """
    reader = _Reader(name, takes_branches)
    tokenizer = _Tokenizer(text)
    for statement in tokenizer.statements():
        reader.add(statement)
    for line, document, expands in tokenizer.documents:
        shown = reader.expand(document, line) if expands else document
        reader.script.documents.append((line, shown))
    return reader.script


@dataclass
class _Reader:
    """Evaluates statements in order."""

    name: str
    takes_branches: bool = False
    script: Script = field(default_factory=Script)
    # For each ``if`` or ``case`` around this place, the innermost last: whether this branch runs
    # (None: not known), and whether an earlier one has run.
    branches: list[tuple[bool | None, bool | None]] = field(default_factory=list)
    follows: bool = False  # the statement before ended with && or ||
    # The statements of a condition up to ``then``, and whether an earlier branch has run.
    condition: list[_Statement] = field(default_factory=list)
    earlier: bool | None = False
    total: int = 0

    def add(self, statement: _Statement) -> None:
        """Evaluate one statement."""
        if self.condition:
            if not statement.words or _plain(statement.words[0]) != "then":
                self.condition.append(statement)
                return
            self._enter()
        is_conditional = self.follows
        self.follows = statement.end in ("&&", "||")
        words = list(statement.words)
        is_declared = False
        while words and (plain := _plain(words[0])) is not None:
            if plain in ("if", "elif", "else", "case", "fi", "esac"):
                self._branch(plain, words[1:], statement)
                if plain not in ("else", "fi", "esac"):
                    return
            elif plain in _DECLARING:
                is_declared = True
            elif not (is_declared and plain.startswith("-")) and plain not in _KEYWORDS:
                break
            del words[0]
        runs = [branch[0] for branch in self.branches]
        if False in runs:
            return
        self.is_undecided = is_conditional or None in runs
        while words and (match := _ASSIGNMENT.match(words[0][0].text if words[0] else "")):
            if words[0][0].is_quoted or not words[0][0].expands:
                break
            is_array = statement.array is not None and len(words) == 1
            values = self._elements(statement) if is_array else None
            if values is None:
                first = words[0][0]._replace(text=words[0][0].text[match.end() :])
                values = [self._joined([first, *words[0][1:]], statement.line)]
            self._assign(match[1], values, bool(match[2]), is_array, statement.line)
            del words[0]
        if words:
            expanded = [text for word in words for text in self._fields(word, statement.line)]
            if statement.array is not None:
                expanded += self._elements(statement)
            self.script.commands.append(Command(statement.line, expanded))

    def _branch(self, keyword: str, condition: list[_Word], statement: _Statement) -> None:
        """Enter or leave a branch of ``if`` or ``case``."""
        if keyword == "if":
            self.condition, self.earlier = [statement._replace(words=condition)], False
        elif keyword == "case":
            self.branches.append((None, None))
        elif not self.branches:
            return
        elif keyword in ("fi", "esac"):
            self.branches.pop()
        else:
            _, earlier = self.branches.pop()
            if keyword == "elif":
                self.condition, self.earlier = [statement._replace(words=condition)], earlier
            else:
                self.branches.append((None if earlier is None else not earlier, True))

    def _enter(self) -> None:
        """Enter the branch whose condition has been read."""
        verdict, operator = None, ""
        for statement in self.condition:
            one = self._verdict(statement)
            pair = (verdict, one)
            if operator == "&&":
                verdict = False if False in pair else (None if None in pair else True)
            elif operator == "||":
                verdict = True if True in pair else (None if None in pair else False)
            else:
                verdict = one
            operator = statement.end
        self.condition, self.follows = [], False
        if self.earlier is False:
            self.branches.append((verdict, verdict))
        else:
            self.branches.append((False if self.earlier else None, self.earlier))

    def _verdict(self, statement: _Statement) -> bool | None:
        """Return whether ``[ A = B ]``, ``[ -n A ]`` and the like hold; None: not known."""
        texts = [self._joined(word, statement.line) for word in statement.words]
        if any("$" in text or "`" in text for text in texts):
            return None
        if len(texts) < 3 or texts[0] not in ("[", "[[") or texts[-1] not in ("]", "]]"):
            return None
        match texts[1:-1]:
            case [left, "=" | "==" | "-eq", right]:
                return left == right
            case [left, "!=" | "-ne", right]:
                return left != right
            case ["-n", text]:
                return text != ""
            case ["-z", text]:
                return text == ""
        return None

    is_undecided: bool = False  # whether it is not known if this statement runs

    def _elements(self, statement: _Statement) -> list[str]:
        return [
            text for word in statement.array or [] for text in self._fields(word, statement.line)
        ]

    def _assign(
        self, name: str, values: list[str], appends: bool, is_array: bool, line: int
    ) -> None:
        variables = self.script.variables
        before = variables.get(name)
        if appends and before is not None:
            values = [*before, *values] if is_array else ["".join((*before, *values))]
        if self.is_undecided and before is not None and before != values:
            self.script.undecided.append(
                f"{self.name}:{line}: {name} is set again under a condition, which is not decided: "
                f"its value before, {_short(before)}, is used"
            )
            if not self.takes_branches:
                return
        for value in values:
            self._count(value, line)
        variables[name] = values

    def _count(self, text: str, line: int) -> None:
        self.total += len(text)
        if len(text) > _MOST_CHARACTERS or self.total > _MOST_TOTAL:
            raise RecipeError(
                f"{self.name}:{line}: variables expand to more than {_MOST_CHARACTERS:,} "
                f"characters of a word, or {_MOST_TOTAL:,} in all; no command line is as long"
            )

    def _joined(self, word: _Word, line: int) -> str:
        """Expand a word to one text."""
        return "".join(self.expand(part.text, line) if part.expands else part.text for part in word)

    def _fields(self, word: _Word, line: int) -> Iterator[str]:
        """Expand a word to fields: what is not quoted is split at white space."""
        if len(word) == 1 and word[0].expands:
            match = _REFERENCE.fullmatch(word[0].text)
            name = match and (match["name"] or match["plain"])
            if match and match["array"] and name in self.script.variables and word[0].is_quoted:
                for value in self.script.variables[name]:
                    self._count(value, line)
                    yield value
                return
        text = self._joined(word, line)
        self._count(text, line)
        if any(part.is_quoted for part in word):
            # ``bash -c "python pretrain_gpt.py --lr 1"`` and ``eval "$COMMAND"`` hold a command.
            yield from _split(text) if re.search(r"\s--\w", text) else [text]
        else:
            yield from _split(text)

    def expand(self, text: str, line: int) -> str:
        """Expand variables and arithmetic; what is unknown stays as it is written."""
        pieces, position = [], 0
        while (start := text.find("$", position)) >= 0:
            pieces.append(text[position:start])
            if text.startswith("$((", start):
                end = _end_of_expansion(text, start)
                pieces.append(self._arithmetic(text[start:end], line))
            elif text.startswith("${", start):
                end = _end_of_expansion(text, start)
                match = _REFERENCE.fullmatch(text, start, end)
                pieces.append(self._value(match, line) if match else text[start:end])
            elif match := _REFERENCE.match(text, start):
                end = match.end()
                pieces.append(self._value(match, line))
            else:
                end = start + 1
                pieces.append("$")
            self._count(pieces[-1], line)
            position = end
        return "".join((*pieces, text[position:]))

    def _value(self, match: re.Match[str], line: int) -> str:
        values = self.script.variables.get(match["plain"] or match["name"])
        default = match["default"]
        if default is not None and default.startswith(":") and values == [""]:
            values = None
        if values is not None and (match["array"] or len(values) == 1):
            return " ".join(values)
        if values:
            return values[0]  # of an array, as bash does
        if default is not None and len(default) <= _MOST_NESTED:
            return self.expand(default.removeprefix(":")[1:].strip("\"'"), line)
        return match[0]

    def _arithmetic(self, text: str, line: int) -> str:
        if len(text) > _MOST_NESTED:
            return text
        inner = self.expand(text[3:-2], line)

        def value_of(match: re.Match[str]) -> str:
            values = self.script.variables.get(match[0])
            return values[0] if values is not None and len(values) == 1 else match[0]

        inner = _NAME.sub(value_of, inner)
        try:
            return str(arithmetic(inner, divides_whole=True))
        except ValueError:
            return text


def _split(text: str) -> Iterator[str]:
    """Split a text at white space outside of ``$(...)`` and the like, and skip redirections."""
    pieces: list[str] = []
    start = position = 0
    while position < len(text):
        if text[position].isspace():
            pieces.append(text[start:position])
            start = position = position + 1
        else:
            is_expansion = text[position] in "$`"
            position = _end_of_expansion(text, position) if is_expansion else position + 1
    skips = False
    for piece in filter(None, [*pieces, text[start:]]):
        match = _REDIRECTED.match(piece)
        if not skips and not match:
            yield piece
        skips = match is not None and match.end() == len(piece)


def _plain(word: _Word) -> str | None:
    """Return the text of a word that has no quotes and no variables."""
    return word[0].text if len(word) == 1 and not word[0].is_quoted else None


def _end_of_expansion(text: str, start: int) -> int:
    """Return where the ``$(...)``, ``${...}`` or backticks at ``start`` end; all three may nest.

    A ``$`` before anything else ends by itself, and what is not closed ends with the text.
    """
    closing: list[str] = []  # the closing characters that are still to come
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif closing and char == closing[-1]:
            closing.pop()
        elif text.startswith(("$(", "${"), position):
            position += 1
            closing.append(")" if text[position] == "(" else "}")
        elif char in '`"':
            closing.append(char)
        elif char == "(" and closing[-1:] == [")"]:
            closing.append(")")
        elif char == "'" and closing[-1:] == [")"]:
            position = text.find("'", position + 1)
            if position < 0:
                break
        position += 1
        if not closing:
            return position
    return len(text)


def _short(values: list[str]) -> str:
    text = one_line(" ".join(values)) or "empty"
    return text if len(text) <= 60 else f"{text[:60]}..."


class _Tokenizer:
    """Cuts a script into statements. It never fails: a quote that is not closed ends the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.documents: list[tuple[int, str, bool]] = []
        self._pending: list[tuple[str, bool, bool]] = []  # here-documents of this line
        self._line, self._counted = 1, 0

    def statements(self) -> Iterator[_Statement]:
        text = self.text
        words: list[_Word] = []
        array: list[_Word] | None = None
        line, ended = 1, -1
        while self.position < len(text):
            char = text[self.position]
            if char == "#" and (self.position == 0 or text[self.position - 1] in " \t\n;("):
                self.position = self._find("\n")
            elif text.startswith("\\\n", self.position):
                self.position += 2
            elif char == "\n":
                self.position += 1
                self._read_documents()
                if array is None or not self._is_open:
                    if words:
                        yield _Statement(line, words, array, char)
                    words, array = [], None
            elif char in " \t\r":
                self.position += 1
            elif char == ")" and self._is_open:
                self.position += 1
                self._is_open = False
            elif char in ";&|()" and not text.startswith("&>", self.position):
                end = char * 2 if char in "&|" and text[self.position + 1 :][:1] == char else char
                self.position += len(end)
                if words:
                    yield _Statement(line, words, array, end)
                words, array = [], None
                self._is_open = False
            elif char in "<>&":
                is_joined = words and self.position == ended and char != "&"
                if is_joined and (_plain(words[-1]) or "").isdecimal():
                    del words[-1]  # the 2 of ``2>&1``
                self._redirect()
            else:
                if not words:
                    line = self._line_here()
                word = self._word()
                ended = self.position
                (words if array is None or not self._is_open else array).append(word)
                opens = text.startswith("(", self.position) and word and not word[-1].is_quoted
                if opens and array is None and word[-1].text.endswith("="):
                    self.position += 1
                    array, self._is_open = [], True
        if words:
            yield _Statement(line, words, array, "")

    _is_open = False  # inside of the brackets of an array

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def _find(self, wanted: str) -> int:
        index = self.text.find(wanted, self.position)
        return len(self.text) if index < 0 else index

    def _redirect(self) -> None:
        """Skip a redirection, and note a here-document."""
        match = _HERE.match(self.text, self.position)
        if match and not self.text.startswith("<<<", self.position):
            self._pending.append((match[3], not match[2], bool(match[1])))
            self.position = match.end()
            return
        match = _REDIRECTION.match(self.text, self.position)
        self.position = match.end() if match else self.position + 1
        if self.text[self.position : self.position + 1] not in ("", *" \t\r\n;&|()<>"):
            self._word()  # the file

    def _read_documents(self) -> None:
        for word, expands, strips in self._pending:
            line, lines = self._line_here(), []
            while self.position < len(self.text):
                end = self._find("\n")
                content = self.text[self.position : end]
                self.position = end + 1
                if (content.lstrip("\t") if strips else content).rstrip("\r") == word:
                    break
                lines.append(content)
            self.documents.append((line, "\n".join(lines), expands))
        self._pending = []

    def _word(self) -> _Word:
        text = self.text
        parts: list[_Part] = []
        plain: list[str] = []

        def end_plain() -> None:
            if plain:
                parts.append(_Part("".join(plain), True, False))
                plain.clear()

        while self.position < len(text):
            char = text[self.position]
            if char in " \t\r\n;&|()<>":
                break
            if char == "\\":
                if not text.startswith("\\\n", self.position):
                    plain.append(text[self.position + 1 : self.position + 2])
                self.position += 2
            elif char == "'":
                end_plain()
                self.position += 1
                end = self._find("'")
                parts.append(_Part(text[self.position : end], False, True))
                self.position = end + 1
            elif char == '"':
                end_plain()
                parts.append(_Part(self._double_quoted(), True, True))
            elif char in "$`":
                plain.append(self._dollar())
            else:
                plain.append(char)
                self.position += 1
        end_plain()
        return parts or [_Part("", False, True)]

    def _double_quoted(self) -> str:
        text, pieces = self.text, []
        self.position += 1
        while self.position < len(text) and text[self.position] != '"':
            if text[self.position] == "\\":
                escaped = text[self.position + 1 : self.position + 2]
                pieces.append("" if escaped == "\n" else escaped)
                self.position += 2
            elif text[self.position] in "$`":
                pieces.append(self._dollar())
            else:
                pieces.append(text[self.position])
                self.position += 1
        self.position += 1
        return "".join(pieces)

    def _dollar(self) -> str:
        """Return the text of a ``$`` or a backtick, up to its closing bracket."""
        start = self.position
        self.position = _end_of_expansion(self.text, start)
        return self.text[start : self.position]
