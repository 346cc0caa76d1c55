"""Parse an untrusted pickle as data. Nothing that it names is imported, called or instantiated.

A pickle is a program, and Python's unpickler runs it. Even with a list of allowed names, the
unpickler hands real classes to this program, which can set their attributes. A pickle can also be
made to take endless time and memory.

This module executes only the few instructions that checkpoints consist of. They make plain values,
and ``Record``s that describe the objects in the pickle. This module does not use torch.
"""

import mmap
import pickle  # for its opcodes only
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError

from composer3d.facts.errors import CheckpointError, UserError
from composer3d.facts.files import MIB, RefusedFileError
from composer3d.facts.text import in_quotes
from composer3d.runtime import shortage

# The largest pickle in a torch file, in bytes. A tensor takes about 200 of them.
LIMIT = 256 * MIB
# The longest text in a torch file, such as a tokenizer, and all its texts together, in bytes.
_LONGEST_TEXT = 64 * MIB
_ALL_TEXTS = 128 * MIB

_LONGEST_NAME = 1000  # characters of a module's name and a name in it

# The most values on the stack that are not yet in a list, tuple or dict, and the most marks.
# Python's pickler puts 1,000 items or pairs at a time on the stack, and one mark for each level.
_MAX_STACK = 10_000
# Without its texts, a checkpoint has 1.6 to 2.9 bytes for each instruction. A flood of one
# instruction has 1. The average is checked after every _INSTRUCTIONS_PER_CHECK instructions.
_MIN_BYTES_PER_INSTRUCTION = 1.2
_INSTRUCTIONS_PER_CHECK = 1 << 12
# The most memory of the values without their texts: this much for each byte of the pickle, and a
# free allowance. A .metadata takes up to 12.7: that was measured for 1 to 3,000 tensors of 0 to 4
# dims in 1 to 16,384 parts. The state_dicts of torch.save take up to 9. A pickle of nothing but
# dicts of one item would take 45.
_MAX_MEMORY_PER_BYTE = 16
_FREE_MEMORY = 2 * MIB
# The longest key of a dict that is a text, in bytes. Two texts that are equal, but not the same
# object, are compared in each look-up, so that long ones would take quadratic time.
_LONGEST_KEY = 4096

# The memory of values in CPython 3.11 to 3.14, in bytes. The share of an item includes the room
# that a container keeps for more items.
_DICT_BYTES = 64
_FILLED_DICT_BYTES = 160  # of the table that a dict gets with its first item
_FILLED_DICT_ITEMS = 5  # for which this table has room
_ITEM_BYTES = 64  # of each further item
_LIST_BYTES = 56
_TUPLE_BYTES = 48
_RECORD_BYTES = 64
_NUMBER_BYTES = 32
_REFERENCE_BYTES = 9

# A new integer key of a dict may exceed the number of its items by this much. The optimizers of
# torch number parameters from 0, and leave out those without state.
_MAX_KEY_GAP = 1000

_ENDS_EARLY = "it is cut off: it names more bytes than it has"


@dataclass(slots=True, eq=False)
class Name:
    """The dotted path of a class, function or constant in a pickle. It is never imported."""

    path: str


@dataclass(slots=True, eq=False)
class Record:
    """A description of an object in a pickle. The object itself is never made.

    A record equals only itself and is hashed by identity.

    Attributes:
        path: the class or function that the pickle calls to make the object.
        arguments: the arguments of that call.
        state: the state that the pickle gives to the object, if any.
        items: the items that the pickle sets on the object as on a dict, if any.
    """

    path: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] | None = None


class Storage(Record):
    """A reference to bytes that are stored outside the pickle. ``arguments`` identify them."""


class PickleError(ValueError):
    """The pickle does not belong to a checkpoint.

    The message says for the user what is wrong. Values from the file are shortened in it.
    """


def parse(
    content: bytes | mmap.mmap,
    names: Collection[str],
    *,
    storages: bool = False,
    longest_text: int = _LONGEST_TEXT,
    all_texts: int | None = _ALL_TEXTS,
) -> Any:
    """Parse a pickle of protocol 2 to 5.

    Time and memory are proportional to the length of the pickle.

    Args:
        content: the pickle.
        names: the dotted paths that the pickle may name. Any other path is refused at once.
        storages: whether the pickle may refer to ``Storage``s.
        longest_text: the longest text that is allowed, in bytes.
        all_texts: the limit of all texts together, in bytes. None if the size of the file is limit
            enough.

    Returns:
        The value in the pickle, made of None, bool, int, float, str, list, tuple, dict, ``Name``
        and ``Record``. It can be nested to any depth, contain itself, and contain one value many
        times. Code that walks through it must limit the number of values.

    Raises:
        PickleError: the pickle is cut off, names a path that is not in ``names``, exceeds a limit,
            or has an instruction that no checkpoint needs.
    """
    return _Machine(content, names, storages, longest_text, all_texts).run()


class _Machine:
    """Python's pickle machine, with only the instructions that torch's writers use."""

    def __init__(
        self,
        content: bytes | mmap.mmap,
        names: Collection[str],
        storages: bool,
        longest_text: int,
        all_texts: int | None,
    ) -> None:
        self._content = content
        self._names = names
        self._storages = storages
        self._longest_text = longest_text
        self._all_texts = all_texts

        self._position = 0  # of the next byte
        self._text_bytes = 0  # of all texts so far
        self._stack: list[Any] = []  # values since the last mark
        self._marked: list[list[Any]] = []  # for each mark, the stack below it
        # Writers number the values that they refer to again from 0, without gaps. In a dict, the
        # numbers of an attacker could have the same hash, and each lookup would try them all.
        self._memo: list[Any] = []
        self._made_names: dict[str, Name] = {}  # by path
        self._memory = 0  # of the values so far without their texts, in bytes
        self._most_memory = _FREE_MEMORY + _MAX_MEMORY_PER_BYTE * len(content)

    def run(self) -> Any:
        content, handlers, stop = self._content, _HANDLERS, pickle.STOP[0]
        n_done = 0
        try:
            while True:
                for _ in range(_INSTRUCTIONS_PER_CHECK):
                    code = content[self._position]
                    self._position += 1
                    if code == stop:
                        return self._stack.pop()
                    handlers[code](self)
                n_done += _INSTRUCTIONS_PER_CHECK
                self._refuse_flood(n_done)
        except (IndexError, struct.error):
            raise PickleError("it is cut off, or not the pickle of a checkpoint") from None

    def _refuse_flood(self, n_done: int) -> None:
        """Refuse a pickle that repeats instructions to take time or memory."""
        n_bytes = self._position - self._text_bytes
        is_too_dense = n_bytes < _MIN_BYTES_PER_INSTRUCTION * n_done
        # The number of marks is compared first, because the sum takes time for each of them.
        is_too_deep = (
            len(self._marked) > _MAX_STACK
            or len(self._stack) + sum(map(len, self._marked)) > _MAX_STACK
        )
        if is_too_dense or is_too_deep or self._memory > self._most_memory:
            raise PickleError("it repeats instructions as no writer of checkpoints does")

    def _refuse(self) -> None:
        at = self._position - 1
        raise PickleError(f"its byte {at:,} is an instruction that no checkpoint needs")

    # Reading the operands of an instruction.

    def _read(self, count: int) -> bytes:
        begin = self._position
        self._position = end = begin + count
        if end > len(self._content):
            raise PickleError(_ENDS_EARLY)
        return self._content[begin:end]

    def _read_byte(self) -> int:
        self._position += 1
        return self._content[self._position - 1]

    def _read_uint32(self) -> int:
        return int.from_bytes(self._read(4), "little")

    def _read_line(self) -> str:
        end = self._content.find(b"\n", self._position, self._position + _LONGEST_NAME)
        # Without a line end in reach, the line is empty, and the name made of it is refused.
        length = max(end - self._position, 0)
        return _decode(self._read(length + 1)[:-1])

    def _pop_to_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._marked.pop()
        return values

    # Instructions about the pickle itself: protocol, frames, marks and the memo.

    def _skip_protocol(self) -> None:
        if self._read_byte() > 5:
            raise PickleError("it is of a later protocol than 5")

    def _skip_frame(self) -> None:
        if int.from_bytes(self._read(8), "little") > len(self._content) - self._position:
            raise PickleError(_ENDS_EARLY)

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _memoize(self) -> None:
        self._memory += _REFERENCE_BYTES
        self._memo.append(self._stack[-1])

    def _put_uint8(self) -> None:
        self._put(self._read_byte())

    def _put_uint32(self) -> None:
        self._put(self._read_uint32())

    def _put(self, index: int) -> None:
        if index > len(self._memo):
            raise PickleError("it numbers its values with gaps, as no writer of checkpoints does")
        self._memory += _REFERENCE_BYTES
        self._memo[index : index + 1] = (self._stack[-1],)

    def _get_uint8(self) -> None:
        self._get(self._read_byte())

    def _get_uint32(self) -> None:
        self._get(self._read_uint32())

    def _get(self, index: int) -> None:
        if index >= len(self._memo):
            raise PickleError("it refers to a value that it has not made")
        self._stack.append(self._memo[index])

    # Instructions that push plain values.

    def _push_none(self) -> None:
        self._stack.append(None)

    def _push_true(self) -> None:
        self._stack.append(True)

    def _push_false(self) -> None:
        self._stack.append(False)

    def _push_uint8(self) -> None:
        self._stack.append(self._read_byte())

    def _push_uint16(self) -> None:
        self._memory += _NUMBER_BYTES
        self._stack.append(int.from_bytes(self._read(2), "little"))

    def _push_int32(self) -> None:
        self._memory += _NUMBER_BYTES
        self._stack.append(int.from_bytes(self._read(4), "little", signed=True))

    def _push_long(self) -> None:
        count = self._read_byte()
        if count > 8:
            raise PickleError("it holds a number of more than 64 bits")
        self._memory += _NUMBER_BYTES
        self._stack.append(int.from_bytes(self._read(count), "little", signed=True))

    def _push_float(self) -> None:
        self._memory += _NUMBER_BYTES
        self._stack.append(struct.unpack(">d", self._read(8))[0])

    def _push_short_text(self) -> None:
        self._push_text(self._read_byte())

    def _push_long_text(self) -> None:
        self._push_text(self._read_uint32())

    def _push_text(self, size: int) -> None:
        # The limits are checked before the text is copied.
        self._text_bytes += size
        if size > self._longest_text:
            raise PickleError(
                f"it holds a text of {size:,} bytes, and at most {self._longest_text:,} are read"
            )
        if self._all_texts is not None and self._text_bytes > self._all_texts:
            raise PickleError(
                f"it holds texts of {self._text_bytes:,} bytes or more in all, and at most "
                f"{self._all_texts:,} are read"
            )
        self._stack.append(_decode(self._read(size)))

    # Instructions that make and fill containers.

    def _make_tuple_0(self) -> None:
        self._stack.append(())

    def _make_tuple_1(self) -> None:
        self._memory += _TUPLE_BYTES
        self._stack[-1] = (self._stack[-1],)

    def _make_tuple_2(self) -> None:
        self._memory += _TUPLE_BYTES + _REFERENCE_BYTES
        last = self._stack.pop()
        self._stack[-1] = (self._stack[-1], last)

    def _make_tuple_3(self) -> None:
        self._memory += _TUPLE_BYTES + 2 * _REFERENCE_BYTES
        last = self._stack.pop()
        middle = self._stack.pop()
        self._stack[-1] = (self._stack[-1], middle, last)

    def _make_tuple(self) -> None:
        values = tuple(self._pop_to_mark())
        self._memory += _TUPLE_BYTES + _REFERENCE_BYTES * len(values)
        self._stack.append(values)

    def _make_list(self) -> None:
        self._memory += _LIST_BYTES
        self._stack.append([])

    def _append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _append_many(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError("it appends to something that is not a list")
        if not target:
            self._memory += 4 * _REFERENCE_BYTES
        self._memory += _REFERENCE_BYTES * len(values)
        target.extend(values)

    def _make_dict(self) -> None:
        self._memory += _DICT_BYTES
        self._stack.append({})

    def _set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, keys_and_values: list[Any]) -> None:
        """Put alternating keys and values into the dict, or the record, on top of the stack.

        A tuple is refused as a key: hashing a nested one could take endless time, or overflow the C
        stack. Integer keys must be nearly consecutive: keys with the same hash would take time that
        is quadratic in their number. Python hashes a text with a secret of the process, so nobody
        can choose texts with the same hash.
        """
        target = self._stack[-1]
        if type(target) is Record:
            if target.items is None:
                self._memory += _DICT_BYTES
                target.items = {}
            target = target.items
        keys, values = keys_and_values[::2], keys_and_values[1::2]
        key_types = set(map(type, keys))
        if (
            type(target) is not dict
            or len(keys) != len(values)
            or not key_types <= {str, int, Record}
        ):
            raise PickleError(
                "it sets items of something that is not a dict, or under keys of a wrong type"
            )
        if str in key_types and any(type(key) is str and len(key) > _LONGEST_KEY for key in keys):
            raise PickleError(f"it has a dict with a key of more than {_LONGEST_KEY:,} characters")
        n_beyond = len(keys)
        if not target:
            self._memory += _FILLED_DICT_BYTES
            n_beyond -= _FILLED_DICT_ITEMS
        self._memory += _ITEM_BYTES * max(n_beyond, 0)
        if int not in key_types:
            target.update(zip(keys, values, strict=True))
            return
        for key, value in zip(keys, values, strict=True):
            if type(key) is int and not 0 <= key <= len(target) + _MAX_KEY_GAP:
                raise PickleError("it has a dict whose keys are integers, but not consecutive ones")
            target[key] = value

    # Instructions that name classes and functions, and call them. Here they only make records.

    def _push_global(self) -> None:
        module = self._read_line()
        self._push_name(f"{module}.{self._read_line()}")

    def _push_global_from_stack(self) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        if (
            type(name) is not str
            or type(module) is not str
            or len(module) + len(name) > _LONGEST_NAME
        ):
            raise PickleError("it names something that is not a class or function")
        self._push_name(f"{module}.{name}")

    def _push_name(self, path: str) -> None:
        if path not in self._names:
            raise PickleError(
                f"it names {in_quotes(path)}, which is refused: nothing of it was run"
            )
        if path not in self._made_names:
            self._made_names[path] = Name(path)
        self._stack.append(self._made_names[path])

    def _call(self) -> None:
        arguments = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Name or type(arguments) is not tuple:
            raise PickleError("it calls something that it has not named")
        self._memory += _RECORD_BYTES
        self._stack[-1] = Record(target.path, arguments)

    def _set_state(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Record or target.state is not None:
            raise PickleError(
                "it gives a state to a value that cannot have one, or that has one already"
            )
        target.state = state

    def _refer_to_storage(self) -> None:
        identity = self._stack[-1]
        if not self._storages or type(identity) is not tuple:
            raise PickleError("it refers to bytes outside of it")
        self._memory += _RECORD_BYTES
        self._stack[-1] = Storage("", identity)


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    pickle.PROTO: _Machine._skip_protocol,
    pickle.FRAME: _Machine._skip_frame,
    pickle.MARK: _Machine._mark,
    pickle.MEMOIZE: _Machine._memoize,
    pickle.BINPUT: _Machine._put_uint8,
    pickle.LONG_BINPUT: _Machine._put_uint32,
    pickle.BINGET: _Machine._get_uint8,
    pickle.LONG_BINGET: _Machine._get_uint32,
    pickle.NONE: _Machine._push_none,
    pickle.NEWTRUE: _Machine._push_true,
    pickle.NEWFALSE: _Machine._push_false,
    pickle.BININT1: _Machine._push_uint8,
    pickle.BININT2: _Machine._push_uint16,
    pickle.BININT: _Machine._push_int32,
    pickle.LONG1: _Machine._push_long,
    pickle.BINFLOAT: _Machine._push_float,
    pickle.SHORT_BINUNICODE: _Machine._push_short_text,
    pickle.BINUNICODE: _Machine._push_long_text,
    pickle.EMPTY_TUPLE: _Machine._make_tuple_0,
    pickle.TUPLE1: _Machine._make_tuple_1,
    pickle.TUPLE2: _Machine._make_tuple_2,
    pickle.TUPLE3: _Machine._make_tuple_3,
    pickle.TUPLE: _Machine._make_tuple,
    pickle.EMPTY_LIST: _Machine._make_list,
    pickle.APPEND: _Machine._append,
    pickle.APPENDS: _Machine._append_many,
    pickle.EMPTY_DICT: _Machine._make_dict,
    pickle.SETITEM: _Machine._set_item,
    pickle.SETITEMS: _Machine._set_items,
    pickle.GLOBAL: _Machine._push_global,
    pickle.STACK_GLOBAL: _Machine._push_global_from_stack,
    pickle.NEWOBJ: _Machine._call,  # of a class
    pickle.REDUCE: _Machine._call,  # of a function or a class
    pickle.BUILD: _Machine._set_state,
    pickle.BINPERSID: _Machine._refer_to_storage,
}
# The handler of each opcode. An opcode that is not in _INSTRUCTIONS is refused.
_HANDLERS = [_INSTRUCTIONS.get(bytes([code]), _Machine._refuse) for code in range(256)]


def _decode(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise PickleError("it holds a text that is not UTF-8") from None


# What a file can raise, whatever is in it: it cannot be opened, ends early, or is too large; its
# values are wrong, missing, or of another type than those that Python, torch and safetensors take.
_DAMAGE = (
    OSError,
    EOFError,
    MemoryError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    SafetensorError,
)


@contextmanager
def reading(place: object, way_out: str = "") -> Iterator[None]:
    """Turn what a damaged file can raise within the block into a CheckpointError with ``place``.

    A UserError passes unchanged: it already says what is wrong, and it is not always damage. A
    checkpoint of a later composer3d is whole. Other errors, such as an AttributeError or a failed
    assertion, are faults of this program, of which no file may be accused.

    Args:
        place: the file, or the part of it that is read.
        way_out: what the user can change, such as "; copy it again". The error ends with it.
    """
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(f"{place} cannot be read: {explain(error)}{way_out}") from None


def explain(error: BaseException) -> str:
    """Describe an error of a reader or writer in one line. Errors of libraries are shortened."""
    if isinstance(error, PickleError):
        return str(error)
    if isinstance(error, RefusedFileError):
        return f"{error.filename} {error.strerror}"
    if shortage.lacks_memory(error):
        return shortage.describe(error)
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first_line}"[:500]
