"""Pickles written by hand, instruction by instruction: what an attacker can write and ``pickle.dumps`` does not."""

from pathlib import Path

PLACE = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def name(path: str) -> bytes:
    module, _, last = path.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def many(*values: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(values) + b"t"


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def held(**values: bytes) -> bytes:
    """A dict."""
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"u"


def pairs(values: dict[bytes, bytes]) -> bytes:
    """A dict under keys that are no texts."""
    return b"}(" + b"".join(key + value for key, value in values.items()) + b"u"


def call(path: str, *arguments: bytes) -> bytes:
    return name(path) + many(*arguments) + b"R"


def made(path: str, state: bytes) -> bytes:
    """An object of a class, and its state."""
    return name(path) + b")\x81" + state + b"b"


def slots(target: bytes, **attributes: bytes) -> bytes:
    """Attributes set on ``target`` itself, which may be a class; what is left on the stack is taken away."""
    return target + b"N" + held(**attributes) + b"\x86b0"


def sizes(*values: int) -> bytes:
    return call("torch.Size", many(*map(number, values)))


def chunk(offsets: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    return made(f"{PLACE}.ChunkStorageMetadata", held(offsets=sizes(*offsets), sizes=sizes(*shape)))


def properties(*more: bytes) -> bytes:
    layout = call("torch.serialization._get_layout", text("torch.strided"))
    order = call(f"{PLACE}._MEM_FORMAT_ENCODING", number(0))
    state = many(name("torch.float32"), layout, b"\x89", order, b"\x89", *more)
    return made(f"{PLACE}.TensorProperties", state)


def entry(shape: tuple[int, ...], *chunks: bytes) -> bytes:
    state = held(properties=properties(), size=sizes(*shape), chunks=listed(*chunks))
    return made(f"{PLACE}.TensorStorageMetadata", state)


def index(tensor: str, *offsets: int) -> bytes:
    return made(
        f"{PLACE}.MetadataIndex", held(fqn=text(tensor), offset=sizes(*offsets), index=b"N")
    )


def info(file: str = "__0_0.distcp", begin: int = 0, length: int = 100) -> bytes:
    return made(
        f"{FILES}._StorageInfo",
        held(relative_path=text(file), offset=number(begin), length=number(length)),
    )


def metadata(
    entries: dict[bytes, bytes], stored: dict[bytes, bytes], before: bytes = b"", after: bytes = b""
) -> bytes:
    state = held(
        state_dict_metadata=pairs(entries),
        planner_data=b"N",
        storage_data=pairs(stored),
        storage_meta=b"N",
        version=text("1.0.0"),
    )
    return b"\x80\x02" + before + made(f"{PLACE}.Metadata", state) + after + b"."


def one(folder: Path, **more: bytes) -> bytes:
    """Metadata of one sound tensor, w, of 2 x 3 numbers of float32 in two parts, with the file they lie in."""
    (folder / "__0_0.distcp").write_bytes(bytes(200))
    shape = entry((2, 3), chunk((0, 0), (1, 3)), chunk((1, 0), (1, 3)))
    stored = {index("w", 0, 0): info(), index("w", 1, 0): info(begin=100)}
    return metadata({text("w"): shape}, stored, **more)
