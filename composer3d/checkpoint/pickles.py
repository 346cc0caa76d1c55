"""Pickles of strangers, read as data. No torch here, and nothing that a pickle names is ever made, called or looked up.

A pickle is a program. Python's unpickler runs it: even with a list of allowed names it hands real classes to a program
that can set their attributes, and it can be made to take memory and time without end. So the few instructions that
checkpoints consist of are carried out here. They make plain values and ``Record``s, which say what a pickle asks for.
"""

import mmap
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from composer3d.spec.errors import CheckpointError
from composer3d.spec.files import MIB, FileTooLargeError, NotPlainFileError

LONGEST_TEXT, ALL_TEXTS = (
    64 * MIB,
    128 * MIB,
)  # bytes: of one text of a torch file, such as a tokenizer, and of all
LIMIT = 256 * MIB  # bytes of the pickle of a torch file: it takes about 200 for each tensor
_STACK = 10_000  # values that wait for their list, tuple or dict: writers hand over 1,000 (pairs) at a time
_WINDOW = 1 << 16  # instructions between two looks at how dense they are
# Bytes of an instruction on average, without its text: checkpoints have 1.6 to 2.9, floods of one instruction 1.
_DENSEST = 1.2


@dataclass(slots=True, eq=False)
class Name:
    """A class, function or constant that a pickle names, by its dotted path. It is only the text."""

    path: str


@dataclass(slots=True, eq=False)
class Record:
    """An object that a pickle asks for. It is equal to nothing but itself, and hashed by identity."""

    path: str  # what would have been called
    arguments: tuple[Any, ...]
    state: Any = None  # what the object would have been given as its state
    items: dict[Any, Any] | None = None  # what would have been put into it as into a dict


class Storage(Record):
    """What a pickle says of bytes that are kept beside it: ``arguments`` is its whole identity."""


class PickleError(ValueError):
    """It is no pickle of a checkpoint. The text is for people, and repeats no value of unknown size."""


def parse(
    pickle: bytes | mmap.mmap,
    names: Collection[str],
    *,
    storages: bool = False,
    longest_text: int = LONGEST_TEXT,
    all_texts: int | None = ALL_TEXTS,
) -> Any:
    """What ``pickle`` describes: None, bool, int, float, str, list, tuple and dict, ``Name`` and ``Record``.

    Takes time and memory in proportion to its length. The result can be nested without end, and hold itself or one
    value many times: whoever walks through it keeps count.

    Args:
        names: the dotted paths that it may name. Any other is refused at once.
        storages: whether it may refer to ``Storage``s.
        longest_text, all_texts: bytes that one of its texts may have, and all of them; None where the file is limit
            enough.

    Raises:
        PickleError: it is cut off, names something else, or holds an instruction that no checkpoint needs.
    """
    return _Machine(pickle, names, storages, longest_text, all_texts).run()


class _Machine:
    """Python's pickle machine, with the instructions that torch's writers use, of protocols 2 to 5."""

    def __init__(
        self,
        pickle: bytes | mmap.mmap,
        names: Collection[str],
        storages: bool,
        longest_text: int,
        all_texts: int | None,
    ) -> None:
        self._pickle, self._names, self._storages = pickle, names, storages
        self._longest_text, self._all_texts = longest_text, all_texts
        self._texts = 0  # bytes of all texts so far
        self._at = 0  # the next byte
        self._stack: list[Any] = []  # since the last mark
        self._below: list[list[Any]] = []  # what lay on the stack at each mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        pickle, done = self._pickle, 0
        table = [getattr(self, f"_{_INSTRUCTIONS.get(code, 'refuse')}") for code in range(256)]
        try:
            while True:
                for _ in range(_WINDOW):
                    code = pickle[self._at]
                    self._at += 1
                    if code == _STOP:
                        return self._stack.pop()
                    table[code]()
                done += _WINDOW
                if (
                    self._at - self._texts < _DENSEST * done
                    or len(self._stack) + sum(map(len, self._below)) > _STACK
                ):
                    raise PickleError("it repeats instructions as no writer of checkpoints does")
        except (IndexError, struct.error):
            raise PickleError("it is cut off, or no pickle of a checkpoint") from None
        except KeyError:
            raise PickleError("it refers to a value that it has not made") from None

    def _refuse(self) -> None:
        raise PickleError(f"its byte {self._at - 1:,} is an instruction that no checkpoint needs")

    # What instructions read.

    def _take(self, count: int) -> bytes:
        begin = self._at
        self._at = end = begin + count
        if end > len(self._pickle):
            raise PickleError("it is cut off: it names more bytes than it has")
        return self._pickle[begin:end]

    def _byte(self) -> int:
        self._at += 1
        return self._pickle[self._at - 1]

    def _long(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _line(self) -> str:
        end = self._pickle.find(b"\n", self._at, self._at + _LINE)
        return _text(self._take(max(end - self._at, 0) + 1)[:-1])

    def _since_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._below.pop()
        return values

    # Instructions: what is around values.

    def _skip_protocol(self) -> None:
        if self._byte() > 5:
            raise PickleError("it is of a later protocol than 5")

    def _skip_frame(self) -> None:
        if int.from_bytes(self._take(8), "little") > len(self._pickle) - self._at:
            raise PickleError("it is cut off: it names more bytes than it has")

    def _mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self) -> None:
        self._memo[self._byte()] = self._stack[-1]

    def _put_far(self) -> None:
        self._memo[self._long()] = self._stack[-1]

    def _get(self) -> None:
        self._stack.append(self._memo[self._byte()])

    def _get_far(self) -> None:
        self._stack.append(self._memo[self._long()])

    # Plain values.

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int_1(self) -> None:
        self._stack.append(self._byte())

    def _int_2(self) -> None:
        self._stack.append(int.from_bytes(self._take(2), "little"))

    def _int_4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _int_wide(self) -> None:
        count = self._byte()
        if count > 8:
            raise PickleError("it holds a number of more than 64 bits")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _short_text(self) -> None:
        self._push_text(self._byte())

    def _long_text(self) -> None:
        self._push_text(self._long())

    def _push_text(self, size: int) -> None:
        self._texts += size
        if size > self._longest_text or (
            self._all_texts is not None and self._texts > self._all_texts
        ):
            raise PickleError("it holds a text, or texts in all, longer than any checkpoint has")
        self._stack.append(_text(self._take(size)))

    # Containers.

    def _tuple_0(self) -> None:
        self._stack.append(())

    def _tuple_1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def _tuple_2(self) -> None:
        last = self._stack.pop()
        self._stack[-1] = (self._stack[-1], last)

    def _tuple_3(self) -> None:
        last, middle = self._stack.pop(), self._stack.pop()
        self._stack[-1] = (self._stack[-1], middle, last)

    def _tuple(self) -> None:
        values = tuple(self._since_mark())
        self._stack.append(values)

    def _list(self) -> None:
        self._stack.append([])

    def _append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError("it appends to what is no list")
        target.extend(values)

    def _dict(self) -> None:
        self._stack.append({})

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, values: list[Any]) -> None:
        """The hash of a nested tuple can take for ever, or more stack than there is: no key is one."""
        target = self._stack[-1]
        if type(target) is Record:
            target.items = target.items if target.items is not None else {}
            target = target.items
        keys = values[::2]
        if (
            type(target) is not dict
            or len(values) % 2
            or not {*map(type, keys)} <= {str, int, Record}
        ):
            raise PickleError(
                "it sets items of what is no dict, or under keys that no checkpoint has"
            )
        target.update(zip(keys, values[1::2], strict=True))

    # What would be made of classes and functions.

    def _name(self) -> None:
        module = self._line()
        self._push_name(f"{module}.{self._line()}")

    def _name_of_texts(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str or len(module) + len(name) > _LINE:
            raise PickleError("it names what is no class or function")
        self._push_name(f"{module}.{name}")

    def _push_name(self, path: str) -> None:
        if path not in self._names:
            raise PickleError(f"it names {path!r:.200}, which is refused: nothing of it was run")
        self._stack.append(Name(path))

    def _call(self) -> None:
        arguments = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Name or type(arguments) is not tuple:
            raise PickleError("it calls what has no name")
        self._stack[-1] = Record(target.path, arguments)

    def _give_state(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Record or target.state is not None:
            raise PickleError("it gives a state to what has none, or has it already")
        target.state = state

    def _storage(self) -> None:
        identity = self._stack[-1]
        if not self._storages or type(identity) is not tuple:
            raise PickleError("it refers to bytes outside of it")
        self._stack[-1] = Storage("", identity)


_STOP, _LINE = ord("."), 1000
_INSTRUCTIONS = {
    0x80: "skip_protocol",
    0x95: "skip_frame",
    ord("("): "mark",
    0x94: "memoize",
    ord("q"): "put",
    ord("r"): "put_far",
    ord("h"): "get",
    ord("j"): "get_far",
    ord("N"): "none",
    0x88: "true",
    0x89: "false",
    ord("K"): "int_1",
    ord("M"): "int_2",
    ord("J"): "int_4",
    0x8A: "int_wide",
    ord("G"): "float",
    0x8C: "short_text",
    ord("X"): "long_text",
    ord(")"): "tuple_0",
    0x85: "tuple_1",
    0x86: "tuple_2",
    0x87: "tuple_3",
    ord("t"): "tuple",
    ord("]"): "list",
    ord("a"): "append",
    ord("e"): "appends",
    ord("}"): "dict",
    ord("s"): "set_item",
    ord("u"): "set_items",
    ord("c"): "name",
    0x93: "name_of_texts",
    0x81: "call",  # NEWOBJ, of a class
    ord("R"): "call",  # REDUCE, of a function or a class
    ord("b"): "give_state",
    ord("Q"): "storage",
}


def _text(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise PickleError("it holds a text that is not UTF-8") from None


@contextmanager
def reading(place: object, way_out: str = "") -> Iterator[None]:
    """Whatever fails within becomes a CheckpointError that names ``place``: a damaged file can raise anything."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{place} cannot be read: {explain(error)}{way_out}") from None


def explain(error: BaseException) -> str:
    """One line of what a reader says, cut where it is long."""
    if isinstance(error, PickleError):
        return str(error)
    if isinstance(error, NotPlainFileError | FileTooLargeError):
        return f"{error.filename} {error.strerror}"
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0] if said else ''}"[:500]
