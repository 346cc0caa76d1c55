"""Read shell scripts as text: variables, arrays, here-documents and options. Nothing runs.

Of the language of shells, assignments and the words of commands are understood. No condition is
decided, no loop or function runs, and nothing is computed. A variable that is set in one of these
is unsure: it keeps the first value that the script gives it, and each word that it goes into tells
of it. A value that is computed, such as ``$((...))`` or ``$(...)``, stays as it is written.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from composer3d.recipe.values import one_line
from composer3d.spec.errors import RecipeError

_MOST_CHARACTERS = 1 << 16  # of an expanded word: A=$A$A doubles with each line
_MOST_NESTED = 200  # characters of a default value, which may nest
_MOST_TOTAL = 1 << 22  # of all expanded words together

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_COMPUTED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")  # in ((N += 1))
_REFERENCE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*|[0-9])(?P<array>\[[@*]\])?"
    r"(?P<default>:?[-=].*)?\})",
    re.DOTALL,
)
_HERE = re.compile(r"<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w*)\2")
_REDIRECTION = re.compile(r"(?:<<<|&>{1,2}|[<>]{1,2}[&|]?)[ \t]*")
_REDIRECTED = re.compile(r"(?:&>{1,2}|[0-9]?>{1,2}&?)")
_SKIPPED = frozenset(("then", "do", "else", "elif", "!", "time", "exec"))
_ENDS_WORD = " \t\r\n;&|()<>"
_OPENING = frozenset(("if", "case", "for", "while", "until", "select", "function", "{"))
_CLOSING = frozenset(("fi", "esac", "done", "}"))
_DECLARING = frozenset(("export", "local", "readonly", "declare", "typeset"))
_SETTING = frozenset(("for", "select", "read", "unset", "getopts", "mapfile", "readarray"))


class _Part(NamedTuple):
    """A piece of a word: its text, whether variables in it count, and whether it is quoted."""

    text: str
    expands: bool
    is_quoted: bool


_Word = list[_Part]


class _Statement(NamedTuple):
    line: int
    words: list[_Word]
    array: list[_Word] | None  # the elements, if the last word is NAME=( or NAME+=(
    end: str  # what ended it: a line break, ; & && | || ( ) or nothing
    depth: int  # round brackets around it


class Text(NamedTuple):
    """Text of a script with variables expanded.

    Attributes:
        text: what could not be expanded stands as it is, with its ``$``.
        unsure: the variables in it whose value depends on what is not decided.
    """

    text: str
    unsure: frozenset[str] = frozenset()


class Command(NamedTuple):
    """One command of a script.

    Attributes:
        line: its first line, from 1.
        words: its words. An empty one stands for unsure variables that give no word.
    """

    line: int
    words: list[Text]


class Variable(NamedTuple):
    """The values of a variable: one text, or the elements of an array."""

    values: list[str]
    unsure: frozenset[str]

    def words(self) -> list[Text]:
        """Return its words, as if it stood in a command without quotes."""
        return [Text(word, self.unsure) for value in self.values for word in value.split()]


@dataclass
class Script:
    """What a script says.

    Attributes:
        commands: its commands, in order.
        variables: the values of each variable at the end.
        documents: the texts of here-documents, by line.
        unsure: a line for each variable that is set where it is not known whether this runs.
        others: the values of these variables that are not used.
    """

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    documents: list[tuple[int, Text]] = field(default_factory=list)
    unsure: dict[str, str] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)


def read_script(text: str, name: str) -> Script:
    """Read the text of a shell script.

    Args:
        text: the script, at most as long as ``source`` allows.
        name: the file, for messages.

    Raises:
        RecipeError: variables expand to too much text.
    """
    reader = _Reader(name)
    tokenizer = _Tokenizer(text)
    for statement in tokenizer.statements():
        reader.add(statement)
    for line, document, expands in tokenizer.documents:
        shown = reader.expand(document, line) if expands else Text(document)
        reader.script.documents.append((line, shown))
    return reader.script


@dataclass
class _Reader:
    """Takes over statements in order."""

    name: str
    script: Script = field(default_factory=Script)
    depth: int = 0  # conditions, loops and functions around this place
    follows: bool = False  # the statement before ended with && or ||
    total: int = 0

    def add(self, statement: _Statement) -> None:
        """Take over one statement: its assignments, and the command that follows them."""
        words = self._without_keywords(statement.words)
        is_unsure = self.follows or self.depth > 0 or statement.depth > 0
        while words and (match := _ASSIGNMENT.match(words[0][0].text)):
            if words[0][0].is_quoted:
                break
            if statement.array is not None and len(words) == 1:
                values = self._elements(statement)
            else:
                first = words[0][0]._replace(text=words[0][0].text[match.end() :])
                values = [self._joined([first, *words[0][1:]], statement.line)]
            if match[2]:
                self.script.variables.pop(match[1], None)  # one element of an array
            else:
                self._assign(match, values, is_unsure, statement)
            del words[0]
        if words:
            found = [text for word in words for text in self._fields(word, statement.line)]
            if statement.array is not None:
                found += self._elements(statement)
            self.script.commands.append(Command(statement.line, found))
        # An assignment never fails, so what follows one and && runs as it does.
        runs = bool(words) or is_unsure or statement.end == "||"
        self.follows = statement.end in ("&&", "||") and runs

    def _without_keywords(self, words: list[_Word]) -> list[_Word]:
        """Return the words after the keywords at the start, and count what opens and closes."""
        is_declared = False
        for number, word in enumerate(words):
            plain = _plain(word) or ""
            if plain in _SETTING or plain in ("((", "let"):
                self._forget(plain, words[number + 1 :])
            if plain in _OPENING:
                self.depth += 1
            elif plain in _CLOSING:
                self.depth = max(0, self.depth - 1)
            elif plain in _DECLARING:
                is_declared = True
            elif plain not in _SKIPPED and not (is_declared and plain.startswith("-")):
                return words[number:]
        return []

    def _forget(self, keyword: str, words: list[_Word]) -> None:
        """Forget the values of variables that a command computes or reads."""
        for text in filter(None, map(_plain, words)):
            names = _COMPUTED.findall(text) if keyword in ("((", "let") else [text]
            for name in names:
                self.script.variables.pop(name, None)
            if keyword in ("for", "select"):
                return  # the others are what the loop goes through

    def _assign(
        self, match: re.Match[str], texts: list[Text], is_unsure: bool, statement: _Statement
    ) -> None:
        name, line = match[1], statement.line
        before = self.script.variables.get(name)
        values = [one.text for one in texts]
        unsure = frozenset().union(*(one.unsure for one in texts))
        if match[3] and before is not None:
            is_array = statement.array is not None
            values = [*before.values, *values] if is_array else ["".join((*before.values, *values))]
            unsure |= before.unsure
        if is_unsure and (before is None or before.values != values):
            again, used = ("", "it") if before is None else (" again", "its value before")
            shown = _short(values if before is None else before.values)
            self.script.unsure.setdefault(
                name,
                f"{self.name}:{line}: {name} is set{again} under a condition, which is not "
                f"decided: {used}, {shown}, is used",
            )
            self.script.others.setdefault(name, []).extend(values)
            unsure |= {name}
            if before is not None:
                values, unsure = before.values, unsure | before.unsure
        for value in values:
            self._count(value, line)
        self.script.variables[name] = Variable(values, unsure)

    def _count(self, text: str, line: int) -> None:
        self.total += len(text)
        if len(text) > _MOST_CHARACTERS or self.total > _MOST_TOTAL:
            raise RecipeError(
                f"{self.name}:{line}: variables expand to more than {_MOST_CHARACTERS:,} "
                f"characters of a word, or {_MOST_TOTAL:,} in all; no command line is as long"
            )

    def _elements(self, statement: _Statement) -> list[Text]:
        words = statement.array or []
        return [text for word in words for text in self._fields(word, statement.line)]

    def _joined(self, word: _Word, line: int) -> Text:
        """Expand a word to one text."""
        texts = [self.expand(one.text, line) if one.expands else Text(one.text) for one in word]
        unsure = frozenset().union(*(one.unsure for one in texts))
        return Text("".join(one.text for one in texts), unsure)

    def _fields(self, word: _Word, line: int) -> Iterator[Text]:
        """Expand a word to fields: what is not quoted is split at white space."""
        text, unsure = self._joined(word, line)
        self._count(text, line)
        is_quoted = any(part.is_quoted for part in word)
        match = _REFERENCE.fullmatch(word[0].text) if len(word) == 1 and word[0].expands else None
        found = self.script.variables.get(match["name"] or "") if match and match["array"] else None
        if found is not None and is_quoted:
            fields: Iterable[str] = found.values  # "${A[@]}" keeps its elements
        elif is_quoted and not re.search(r"\s--\w", text):
            fields = [text]
        else:
            # ``bash -c "python pretrain_gpt.py --lr 1"`` and ``eval "$COMMAND"`` hold a command.
            fields = list(_split(text)) or ([""] if unsure else [])
        for one in fields:
            yield Text(one, unsure)

    def expand(self, text: str, line: int) -> Text:
        """Expand variables; what is unknown stays as it is written."""
        pieces: list[str] = []
        unsure: frozenset[str] = frozenset()
        position = 0
        while (start := text.find("$", position)) >= 0:
            is_bracketed = text.startswith(("${", "$("), start)
            end = _end_of_expansion(text, start) if is_bracketed else start + 1
            match = (
                _REFERENCE.fullmatch(text, start, end)
                if is_bracketed
                else _REFERENCE.match(text, start)
            )
            if match is not None:
                found, end = self._value(match, line), match.end()
            else:
                found = Text(text[start:end])  # $(...), $((...)), ${A%.*}: computed, so it stays
            pieces += [text[position:start], found.text]
            unsure |= found.unsure
            self._count(found.text, line)
            position = end
        return Text("".join((*pieces, text[position:])), unsure)

    def _value(self, match: re.Match[str], line: int) -> Text:
        found = self.script.variables.get(match["plain"] or match["name"])
        default = match["default"]
        is_empty = found is not None and found.values == [""]
        takes_default = default is not None and (found is None or (is_empty and default[0] == ":"))
        if takes_default and len(default) <= _MOST_NESTED:
            shown = self.expand(default.removeprefix(":")[1:].strip("\"'"), line)
            return shown._replace(unsure=shown.unsure | (found.unsure if found else frozenset()))
        if found is None or takes_default:
            return Text(match[0])
        # Of an array without [@], a shell takes the first element.
        values = found.values if match["array"] else found.values[:1]
        return Text(" ".join(values), found.unsure)


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
    """Return the text of a word that has no quotes."""
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
        """Yield the statements in order."""
        words: list[_Word] = []
        array: list[_Word] | None = None
        is_open = False  # inside of the brackets of an array
        line, ended, depth = 1, -1, 0
        while self.position < len(self.text):
            start, char = self.position, self.text[self.position]
            if char in " \t\r\n" or self.text.startswith("\\\n", start):
                self.position += 2 if char == "\\" else 1
                end = char if char == "\n" else ""
                if end:
                    self._read_documents()
            elif char == "#" and (start == 0 or self.text[start - 1] in " \t\n;("):
                self.position, end = self._find("\n"), ""
            elif char == ")" and is_open:
                self.position, end, is_open = start + 1, "", False
            elif self.text.startswith("((", start):
                self.position, end = self._find("))"), ""
                words += [[_Part("((", False, False)], [_Part(self._since(start), False, False)]]
            elif char in ";&|()" and not self.text.startswith("&>", start):
                is_double = char in "&|" and self.text.startswith(char * 2, start)
                end = char * 2 if is_double else char
                self.position += len(end)
                is_open = False
            elif char in "<>&":
                if (
                    words
                    and start == ended
                    and char != "&"
                    and (_plain(words[-1]) or "").isdecimal()
                ):
                    del words[-1]  # the 2 of ``2>&1``
                self._redirect()
                end = ""
            else:
                line = line if words else self._line_here()
                word, end = self._word(), ""
                ended = self.position
                (words if array is None or not is_open else array).append(word)
                is_array = array is None and not word[-1].is_quoted and word[-1].text.endswith("=")
                if is_array and self.text.startswith("(", ended):
                    self.position, array, is_open = ended + 1, [], True
            if end and not is_open:
                if words:
                    yield _Statement(line, words, array, end, depth)
                words, array = [], None
                depth = max(0, depth + (end == "(") - (end == ")"))
        if words:
            yield _Statement(line, words, array, "", depth)

    def _since(self, start: int) -> str:
        return self.text[start : self.position]

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
        parts: _Word = []
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == "'":
                self.position += 1
                start, self.position = self.position, self._find("'")
                parts.append(_Part(self._since(start), False, True))
                self.position += 1
            elif char == '"':
                self.position += 1
                parts.append(_Part(self._up_to('"'), True, True))
                self.position += 1
            elif char in _ENDS_WORD:
                break
            else:
                parts.append(_Part(self._up_to(_ENDS_WORD + "'\""), True, False))
        return parts or [_Part("", False, True)]

    def _up_to(self, ends: str) -> str:
        """Read on to one of the characters ``ends`` that is neither escaped nor in brackets."""
        pieces: list[str] = []
        while self.position < len(self.text) and self.text[self.position] not in ends:
            start, char = self.position, self.text[self.position]
            if char == "\\":
                self.position += 2
                pieces.append(self._since(start)[1:].strip("\n"))
            else:
                self.position = _end_of_expansion(self.text, start) if char in "$`" else start + 1
                pieces.append(self._since(start))
        return "".join(pieces)
