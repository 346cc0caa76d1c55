"""Pickles assembled by hand, instruction by instruction, as an attacker can write them.

Each function returns instructions that leave one value on the stack.
"""

from collections.abc import Callable
from typing import Any

PLACE = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


class Call:
    """Its pickle calls ``function(*arguments)`` if it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def colliding_ints(count: int) -> list[int]:
    """Integers that a dict finds slowly: it looks for the last one in the places of all others.

    Python looks for an int in a place that depends on all its bits, and then, 5 bits of it fewer
    each time, in the next places of a fixed cycle. ``count`` must fit into a dict of 2^18 places.
    """
    last = rest = 1 << 18
    place = 0
    others = dict.fromkeys([place])
    while len(others) < count - 1:
        rest >>= 5
        place = (5 * place + rest + 1) % (1 << 18)
        others[place] = None
    return [*others, last]


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def name(path: str) -> bytes:
    module, _, last = path.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def tuple_of(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def list_of(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def dict_of(**values: bytes) -> bytes:
    """A dict with texts as keys."""
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"u"


def dict_from(values: dict[bytes, bytes]) -> bytes:
    """A dict with keys of any kind, and with any number of them."""
    return b"}" + b"".join(key + value + b"s" for key, value in values.items())


def call(path: str, *arguments: bytes) -> bytes:
    return name(path) + tuple_of(*arguments) + b"R"


def object_of(path: str, state: bytes) -> bytes:
    """An object of the class at ``path``, with its state."""
    return name(path) + b")\x81" + state + b"b"


def set_attributes(target: bytes, **attributes: bytes) -> bytes:
    """Set attributes on ``target`` itself, which may be a class. Leaves nothing on the stack."""
    return target + b"N" + dict_of(**attributes) + b"\x86b0"


def sizes(*values: int) -> bytes:
    return call("torch.Size", tuple_of(*map(number, values)))


def chunk(offsets: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    return object_of(
        f"{PLACE}.ChunkStorageMetadata", dict_of(offsets=sizes(*offsets), sizes=sizes(*shape))
    )


def properties(*extra: bytes) -> bytes:
    layout = call("torch.serialization._get_layout", text("torch.strided"))
    order = call(f"{PLACE}._MEM_FORMAT_ENCODING", number(0))
    state = tuple_of(name("torch.float32"), layout, b"\x89", order, b"\x89", *extra)
    return object_of(f"{PLACE}.TensorProperties", state)


def entry(shape: tuple[int, ...], *chunks: bytes) -> bytes:
    state = dict_of(properties=properties(), size=sizes(*shape), chunks=list_of(*chunks))
    return object_of(f"{PLACE}.TensorStorageMetadata", state)


def index(tensor: str, *offsets: int) -> bytes:
    return object_of(
        f"{PLACE}.MetadataIndex", dict_of(fqn=text(tensor), offset=sizes(*offsets), index=b"N")
    )


def info(file: str = "__0_0.distcp", begin: int = 0, length: int = 100) -> bytes:
    return object_of(
        f"{FILES}._StorageInfo",
        dict_of(relative_path=text(file), offset=number(begin), length=number(length)),
    )


def metadata(
    entries: dict[bytes, bytes], stored: dict[bytes, bytes], before: bytes = b"", after: bytes = b""
) -> bytes:
    """A whole pickle of DCP's metadata, with other instructions before and after the object."""
    state = dict_of(
        state_dict_metadata=dict_from(entries),
        planner_data=b"N",
        storage_data=dict_from(stored),
        storage_meta=b"N",
        version=text("1.0.0"),
    )
    return b"\x80\x02" + before + object_of(f"{PLACE}.Metadata", state) + after + b"."


HALVES = (chunk((0, 0), (1, 3)), chunk((1, 0), (1, 3)))
STORED = {index("w", 0, 0): info(), index("w", 1, 0): info(begin=100)}
# The parts of SOUND are in this file, which has this content.
DATA_FILE, DATA = "__0_0.distcp", bytes(200)


def metadata_of_w(
    *parts: bytes,
    shape: tuple[int, ...] = (2, 3),
    stored: dict[bytes, bytes] = STORED,
    **around: bytes,
) -> bytes:
    """Metadata of one tensor, w. ``around``: ``before`` and ``after`` of ``metadata``."""
    return metadata({text("w"): entry(shape, *parts)}, stored, **around)


# Metadata of one sound tensor of 2 x 3 float32 numbers in two parts.
SOUND = metadata_of_w(*HALVES)
