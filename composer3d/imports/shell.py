"""Read shell scripts as text: variables, arrays, here-documents and options. Nothing runs.

Of the language of shells, assignments and the words of commands are understood. No condition is
decided, no loop or function runs, and nothing is computed. A variable that is set in one of these
is unsure: it keeps the value before, or else has its last one, and each word that it goes into
tells of it. So is every variable that another file or a text may set, as ``source`` and ``eval``
do. What would be computed, such as ``$((...))`` or ``$(...)``, stays as it is written.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from composer3d.facts.errors import RecipeError
from composer3d.facts.text import one_line

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
_FIRST_MARK = 0xF0000
_MARKS = re.compile("[\U000f0000-\U000ffffd]")
_HERE = re.compile(r"<<(-?)[ \t]*(['\"]?)([A-Za-z_]\w*)\2")
_REDIRECTION = re.compile(r"(?:<<<|&>{1,2}|[<>]{1,2}[&|]?)[ \t]*")
_REDIRECTED = re.compile(r"(?:&>{1,2}|[0-9]?>{1,2}&?)")
_SKIPPED = frozenset(("then", "do", "else", "elif", "!", "time", "exec"))
_ENDS_WORD = " \t\r\n;&|()<>"
_OPENING = frozenset(("if", "case", "for", "while", "until", "select", "function", "{"))
_CLOSING = frozenset(("fi", "esac", "done", "}"))
_DECLARING = frozenset(("export", "local", "readonly", "declare", "typeset"))
_COMPUTING = frozenset(("for", "select", "((", "let"))
_SETTING = frozenset(("read", "unset", "getopts", "mapfile", "readarray"))
_RUNNING = frozenset(("source", ".", "eval"))  # may set any variable
_NAMES = re.compile(r"\$\{?([A-Za-z_]\w*)")


class _Part(NamedTuple):
    """A piece of a word: its text, whether variables in it count, and whether it is quoted."""

    text: str
    expands: bool
    is_quoted: bool


_Word = list[_Part]
_Document = tuple[int, str, bool]  # the line of a here-document, its text, whether it expands


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
        unsure: the variables in it that are unsure.
    """

    text: str
    unsure: frozenset[str]


class ShellCommand(NamedTuple):
    """One command of a script.

    Attributes:
        line: its first line, from 1.
        words: its words. An empty one stands for unsure variables that give no word.
    """

    line: int
    words: list[Text]


class _Variable(NamedTuple):
    """The values of a variable, and its mark if it is unsure.

    A mark is a character that no text has. It follows each word that an unsure variable gives, so
    that the words tell of it however often they are put together and split again.
    """

    values: list[str]
    mark: str = ""

    def marked(self) -> list[str]:
        """Return its values with the mark behind each word, or alone if there is none."""
        if not self.mark:
            return self.values
        values = self.values or [""]
        return [re.sub(r"\S+", rf"\g<0>{self.mark}", one) or self.mark for one in values]


@dataclass
class Script:
    """What a script says.

    Attributes:
        commands: its commands, in order.
        variables: all words of its variables with options at the end, as one command.
        documents: the texts of here-documents, by line.
        unsure: a line for each variable that is set where it is not known whether this runs.
        others: all values of these variables. ``$NAME`` stands for one that is not in the script.
    """

    commands: list[ShellCommand] = field(default_factory=list)
    variables: ShellCommand = field(default_factory=lambda: ShellCommand(1, []))
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
    tokenizer = _Tokenizer(_MARKS.sub("", text))
    for statement in tokenizer.statements():
        reader.add(statement, tokenizer.documents)
    reader.finish(tokenizer.documents)
    script = reader.script
    values = [" ".join(found.marked()) for found in reader.variables.values()]
    words = [word for value in values if "--" in value for word in value.split()]
    script.variables.words.extend(map(reader.text_of, words))
    return script


class _Inner(NamedTuple):
    """A here-document in a condition, a loop or a function, and its variables at this place."""

    position: int  # in ``Script.documents``
    line: int
    text: str
    before: dict[str, list[str] | None]


@dataclass
class _Reader:
    """Takes over statements in order."""

    name: str
    script: Script = field(default_factory=Script)
    variables: dict[str, _Variable] = field(default_factory=dict)
    sure: set[str] = field(default_factory=set)  # variables that are set under no condition
    marks: dict[str, str] = field(default_factory=dict)  # the variable of each mark
    mark_of: dict[str, str] = field(default_factory=dict)  # the mark of each variable
    unmarked: set[str] = field(default_factory=set)  # variables that are sure
    inner: list[_Inner] = field(default_factory=list)
    depth: int = 0  # conditions, loops and functions around this place
    follows: bool = False  # the statement before ended with && or ||
    total: int = 0

    def add_documents(self, documents: list[_Document], *, is_inner: bool) -> None:
        """Take over here-documents that stand at this place, and empty the list."""
        for line, text, expands in documents:
            if expands and is_inner:
                before = {name: self._values(name) for name in _NAMES.findall(text)}
                self.inner.append(_Inner(len(self.script.documents), line, text, before))
            found = self.expand(text, line) if expands else text
            self.script.documents.append((line, self.text_of(found)))
        documents.clear()

    def finish(self, documents: list[_Document]) -> None:
        """Expand the documents of functions, which are called below: again, with the last values.

        A function is not told from a condition. So a variable that has changed since is unsure.
        """
        self.add_documents(documents, is_inner=False)
        for position, line, text, before in self.inner:
            changed = [name for name in before if before[name] != self._values(name)]
            for name in changed:
                self.script.unsure.setdefault(
                    name,
                    f"{self.name}:{line}: {name} is set again after this document, which is in a "
                    "function or under a condition: the last value is used",
                )
                self.script.others.setdefault(name, [])
            found = self.text_of(self.expand(text, line))
            found = found._replace(unsure=found.unsure.union(changed))
            self.script.documents[position] = (line, found)

    def _values(self, name: str) -> list[str] | None:
        found = self.variables.get(name)
        return None if found is None else found.values

    def add(self, statement: _Statement, documents: list[_Document]) -> None:
        """Take over one statement: its assignments, and the command that follows them.

        Args:
            statement: the statement.
            documents: the here-documents of a line come with its last statement, which cannot set
                what is in them.
        """
        depth = self.depth
        words = self._without_keywords(statement.words)
        self.add_documents(documents, is_inner=max(depth, self.depth) > 0)
        keywords = statement.words[: len(statement.words) - len(words)]
        is_declared = not _DECLARING.isdisjoint(map(_plain, keywords))
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
                self._drop(match[1])  # one element of an array
            else:
                self._assign(match, values, is_unsure, statement)
            del words[0]
        if words:
            found = [text for word in words for text in self._fields(word, statement.line)]
            if statement.array is not None:
                found += self._elements(statement)
            self.script.commands.append(
                ShellCommand(statement.line, list(map(self.text_of, found)))
            )
            self._note_command(words, is_declared, statement.line)
        # An assignment never fails, so what follows one and && runs as it does.
        runs = bool(words) or is_unsure or statement.end == "||"
        self.follows = statement.end in ("&&", "||") and runs

    def _without_keywords(self, words: list[_Word]) -> list[_Word]:
        """Return the words after the keywords at the start, and count what opens and closes."""
        is_declared = False
        for number, word in enumerate(words):
            plain = _plain(word) or ""
            if plain in _COMPUTING:
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

    def _note_command(self, words: list[_Word], is_declared: bool, line: int) -> None:
        """Forget or doubt the variables that a command may set."""
        plain = [_plain(word) or "" for word in words]
        if is_declared and not all(map(str.isidentifier, plain)):
            self._doubt_all("export or declare, with a name that is not read", line)
        elif plain[0] in _SETTING:
            self._forget(plain[0], words[1:])
        elif plain[:2] == ["printf", "-v"]:
            self._forget(plain[0], words[2:3])
        elif plain[0] in _RUNNING:
            self._doubt_all(f"{plain[0]}, which is not run", line)

    def _doubt_all(self, what: str, line: int) -> None:
        """Make all variables unsure, for ``what`` may have set them again."""
        for name in sorted(self.unmarked):
            values = self.variables[name].values
            shown = _short(self.text_of(" ".join(values)).text)
            self._mark(
                name,
                values,
                f"{self.name}:{line}: {name} may be set again by {what}: its value before, "
                f"{shown}, is used",
            )
            self.script.others.setdefault(name, []).append(f"${name}")

    def _forget(self, keyword: str, words: list[_Word]) -> None:
        """Forget the values of variables that a command computes or reads."""
        for text in filter(None, map(_plain, words)):
            names = _COMPUTED.findall(text) if keyword in ("((", "let") else [text]
            for name in names:
                self._drop(name)
            if keyword in ("for", "select"):
                return  # the others are what the loop goes through

    def _drop(self, name: str) -> None:
        self.variables.pop(name, None)
        self.unmarked.discard(name)

    def _assign(
        self, match: re.Match[str], values: list[str], is_unsure: bool, statement: _Statement
    ) -> None:
        name, before = match[1], self.variables.get(match[1])
        if match[3] and before is not None:
            old, is_array = before.marked(), statement.array is not None
            values = [*old, *values] if is_array else ["".join((*old, *values))]
        for value in values:
            self._count(value, statement.line)
        if not is_unsure:
            self.sure.add(name)
            self.unmarked.add(name)
            self.variables[name] = _Variable(values)
        elif before is None or before.values != values:
            keeps = before is not None and name in self.sure
            self._note_unsure(name, before.values if before and keeps else values, keeps, statement)
            self.script.others.setdefault(name, []).extend(
                self.text_of(value).text for value in values
            )

    def _note_unsure(
        self, name: str, values: list[str], keeps: bool, statement: _Statement
    ) -> None:
        """Mark a variable as unsure, and give it its value before, or else its last one."""
        again, used = (" again", "value before") if keeps else ("", "last value")
        shown = _short(self.text_of(" ".join(values)).text)
        self._mark(
            name,
            values,
            f"{self.name}:{statement.line}: {name} is set{again} under a condition, which is not "
            f"decided: its {used}, {shown}, is used",
        )

    def _mark(self, name: str, values: list[str], line: str) -> None:
        """Give a variable values that are unsure, and a line about it."""
        mark = self.mark_of.setdefault(name, chr(_FIRST_MARK + len(self.mark_of)))
        self.marks[mark] = name
        self.unmarked.discard(name)
        self.variables[name] = _Variable(values, mark)
        self.script.unsure[name] = line

    def text_of(self, text: str) -> Text:
        """Return a text without marks, and the variables that they are of."""
        marks = _MARKS.findall(text)
        return Text(_MARKS.sub("", text), frozenset(self.marks[mark] for mark in marks))

    def _count(self, text: str, line: int) -> None:
        self.total += len(text)
        if len(text) > _MOST_CHARACTERS or self.total > _MOST_TOTAL:
            raise RecipeError(
                f"{self.name}:{line}: variables expand to more than {_MOST_CHARACTERS:,} "
                f"characters of a word, or {_MOST_TOTAL:,} in all; no command line is as long"
            )

    def _elements(self, statement: _Statement) -> list[str]:
        words = statement.array or []
        return [text for word in words for text in self._fields(word, statement.line)]

    def _joined(self, word: _Word, line: int) -> str:
        """Expand a word to one text."""
        return "".join(self.expand(part.text, line) if part.expands else part.text for part in word)

    def _fields(self, word: _Word, line: int) -> Iterator[str]:
        """Expand a word to fields: what is not quoted is split at white space."""
        text = self._joined(word, line)
        self._count(text, line)
        is_quoted = any(part.is_quoted for part in word)
        match = _REFERENCE.fullmatch(word[0].text) if len(word) == 1 and word[0].expands else None
        found = self.variables.get(match["name"] or "") if match and match["array"] else None
        if found is not None and is_quoted:
            yield from found.marked()  # "${A[@]}" keeps its elements
        elif is_quoted and not re.search(r"\s--\w", text):
            yield text
        else:
            # ``bash -c "python pretrain_gpt.py --lr 1"`` and ``eval "$COMMAND"`` hold a command.
            yield from _split(text)

    def expand(self, text: str, line: int) -> str:
        """Expand variables; what is unknown stays as it is written."""
        pieces, position = [], 0
        while (start := text.find("$", position)) >= 0:
            is_bracketed = text.startswith(("${", "$("), start)
            end = _end_of_expansion(text, start) if is_bracketed else start + 1
            match = (_REFERENCE.fullmatch if is_bracketed else _REFERENCE.match)(
                text, start, end if is_bracketed else len(text)
            )
            pieces.append(text[position:start])
            position = match.end() if match else end
            # $(...), $((...)), ${A%.*} and the like would be computed: they stay.
            pieces.append(self._value(match, line) if match else text[start:end])
            self._count(pieces[-1], line)
        return "".join((*pieces, text[position:]))

    def _value(self, match: re.Match[str], line: int) -> str:
        found, default = self.variables.get(match["plain"] or match["name"]), match["default"]
        is_empty = found is None or (
            found.values == [""] and default is not None and default[0] == ":"
        )
        if is_empty and default is not None and len(default) <= _MOST_NESTED:
            shown = self.expand(default.removeprefix(":")[1:].strip("\"'"), line)
            return shown + (found.mark if found else "")
        if found is None:
            return match[0]
        # Of an array without [@], a shell takes the first element.
        return " ".join(found.marked() if match["array"] else found.marked()[:1])


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


def _short(text: str) -> str:
    shown = one_line(text) or "empty"
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


class _Tokenizer:
    """Cuts a script into statements. It never fails: a quote that is not closed ends the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.documents: list[_Document] = []  # those of the lines so far, until they are taken
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
