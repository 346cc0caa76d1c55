"""Pickles read as data: only what torch's writers use is accepted."""

import os
import pickle
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import SafetensorError

from composer3d.checkpoint import pickles
from composer3d.checkpoint.pickles import Name, PickleError, Record, Storage, parse, reading
from composer3d.facts.errors import CheckpointError
from tests.checkpoint.assemble import (
    Call,
    call,
    colliding_ints,
    dict_of,
    name,
    number,
    set_attributes,
    text,
    tuple_of,
)

NAMES = {"a.B", "os.path.join", "builtins.list"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read(protocol: int) -> None:
    value = {
        "none": None,
        "truth": [True, False],
        "numbers": (0, 255, 256, -1, 65536, 2**31, -(2**63), 2**63 - 1),
        "floats": [0.5, -1e300],
        "texts": ["", "x" * 300, "é"],
        "deep": {"a": {"b": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]}},
        7: "seven",
        1001: "with a gap",
    }
    assert parse(pickle.dumps(value, protocol), ()) == value
    many_values = {"list": list(range(3000)), "dict": {str(i): i for i in range(3000)}}
    assert parse(pickle.dumps(many_values, protocol), ()) == many_values


def test_names_calls_and_storages_become_records() -> None:
    named = parse(name("a.B") + b".", NAMES)
    assert type(named) is Name
    assert named.path == "a.B"
    record = parse(
        call("os.path.join", text("x"), text("y")) + dict_of(extra=number(1)) + b"b.", NAMES
    )
    assert type(record) is Record
    assert (record.path, record.arguments, record.state) == (
        "os.path.join",
        ("x", "y"),
        {"extra": 1},
    )
    stored = parse(tuple_of(text("storage"), number(3)) + b"Q.", (), storages=True)
    assert type(stored) is Storage
    assert stored.arguments == ("storage", 3)


def test_nothing_of_the_process_can_be_reached(tmp_path: Path) -> None:
    """Each way to call, make or change something: with allowed names, it changes only records."""
    marker = tmp_path / "marker"
    before = dict(vars(os.path)), list.__dict__.keys()
    calls = [
        call("os.path.join", text(str(marker))),
        call("builtins.list", tuple_of(number(1))) + b"]b",
        name("builtins.list") + b")\x81" + dict_of(append=number(1)) + b"b",
        name("os.path.join") + dict_of(__code__=number(1)) + b"\x85R",
    ]
    for program in calls:
        assert type(parse(program + b".", NAMES)) is Record
    for program in (
        set_attributes(name("builtins.list"), append=number(1)),  # sets attributes of a class
        set_attributes(name("os.path.join"), __code__=number(1)),
        call("os.path.join") + number(1) + b"R",  # calls the result of a call
        name("a.B") + name("a.B") + b"\x85R" + tuple_of() + b"R",
        text("x") + dict_of() + b"b",
        b"]" + dict_of() + b"b",
    ):
        with pytest.raises(PickleError):
            parse(program + b"N.", NAMES)
    assert (dict(vars(os.path)), list.__dict__.keys()) == before
    assert not marker.exists()


@pytest.mark.parametrize(
    "path", ["os.system", "a.C", "a.B.c", "builtins.eval", "composer3d.facts.errors.UserError"]
)
def test_other_names_are_refused(path: str) -> None:
    for program in (
        name(path) + b".",
        text(path.rpartition(".")[0]) + text(path.rpartition(".")[2]) + b"\x93.",
    ):
        with pytest.raises(
            PickleError, match=f"^it names '{path}', which is refused: nothing of it was run$"
        ):
            parse(program, NAMES)


# Instructions that no checkpoint has.
SPARE = [
    *("POP", "POP_MARK", "DUP", "INT", "LONG", "FLOAT", "STRING", "UNICODE", "GET", "PUT", "INST"),
    *("OBJ", "PERSID", "LIST", "DICT", "EXT1", "EXT2", "EXT4", "LONG4", "NEWOBJ_EX", "EMPTY_SET"),
    *("ADDITEMS", "FROZENSET", "BYTEARRAY8", "BINBYTES", "BINBYTES8", "SHORT_BINBYTES"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE8", "NEXT_BUFFER", "READONLY_BUFFER"),
]


@pytest.mark.parametrize("name", SPARE)
def test_instructions_that_no_checkpoint_has_are_refused(name: str) -> None:
    with pytest.raises(PickleError, match="its byte 3 is an instruction that no checkpoint needs"):
        parse(b"(N)" + getattr(pickle, name) + b"1\n" + b"\x00" * 8 + b".", NAMES)


BROKEN = {
    "nothing": b"",
    "no end": b"N",
    "no value": b".",
    "below the mark": b"N(0\x85.",
    "a mark that is not there": b"Nt.",
    "a memo that is not there": b"h\x05.",
    "a far memo that is not there": b"j\xff\xff\xff\xff.",
    "a memo after a gap": b"Nq\x01.",
    "a key after a gap": b"}M\xe9\x03Ns.",
    "a key below 0": b"}J\xff\xff\xff\xffNs.",
    "a text beyond the end": b"X\xff\xff\xff\xffa.",
    "a short text beyond the end": b"\x8c\xffa.",
    "a frame beyond the end": b"\x95" + b"\xff" * 8 + b"N.",
    "a later protocol": b"\x80\x06N.",
    "a wide number": b"\x8a\xff" + b"\x7f" * 255 + b".",
    "no UTF-8": b"X\x03\x00\x00\x00\xed\xa0\x80.",
    "a key that is a tuple": b"})Ns.",
    "a key that is a float": b"}G" + bytes(8) + b"Ns.",
    "an item too many": b"}(NNNu.",
    "items of a list": b"](NNu.",
    "an append to a dict": b"}Na.",
    "a name without end": b"ca" * 1000 + b".",
    "a name of numbers": b"K\x01K\x02\x93.",
    "a call of a number": b"K\x01)R.",
    "a call with a list": name("a.B") + b"]R.",
    "two states": call("a.B") + b"}b}b.",
    "a state that is all there is": b"}b.",
    "a storage of a number": b"K\x01Q.",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_pickles_are_refused(case: str) -> None:
    with pytest.raises(PickleError) as caught:
        parse(BROKEN[case], NAMES, storages=True)
    assert len(str(caught.value)) < 300


def test_storages_are_refused_where_no_tensor_is_expected() -> None:
    with pytest.raises(PickleError, match="it refers to bytes outside of it"):
        parse(tuple_of(text("storage")) + b"Q.", NAMES)


def doubled(times: int) -> bytes:
    """A tuple of two tuples of two tuples, and so on: 2^times values, 5 bytes a level."""
    return b")" + b"".join(b"q%ch%c\x86" % (i % 250, i % 250) for i in range(times))


COLLIDING = [key.to_bytes(4, "little") for key in colliding_ints(170_000)]
BOMBS = {
    "memos of one hash": b"N" + b"".join(b"r" + key for key in COLLIDING + COLLIDING[-1:] * 20_000),
    "keys of one hash": b"}"
    + b"".join(b"J" + key + b"Ns" for key in COLLIDING + COLLIDING[-1:] * 20_000),
    "doubled, as a key": b"}" + doubled(60) + b"Ns.",
    "deep, as a key": b"})" + b"\x85" * 1_000_000 + b"Ns.",
    "a flood of lists": b"(" + b"]" * 30_000_000,
    "a flood of marks": b"(" * 30_000_000,
    "a flood of memos": b"N" + b"\x94" * 30_000_000,
    "a far memo": b"Nr\xff\xff\xff\xff" * 2 + b"X\xff\xff\xff\xff.",
    "lists in lists": b"]" + b"]a" * 10_000_000,
    "wide texts": b"X\x00\x00\x00\x7f" * 10_000,
    "frames": b"\x95" + b"\x00" * 7 + b"\x7f" + b"N.",
}


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_take_no_time_and_no_memory(case: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(PickleError):
            parse(BOMBS[case], NAMES)
        assert time.process_time() - began < 2.0  # under tracemalloc; less than a second without
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


SIZE = 100_000  # bytes of an amplified pickle, and of an honest one


def repeated(unit: bytes) -> bytes:
    """A list to which the values of ``unit`` are appended in groups of up to some thousands."""
    group = b"(" + unit * max(1, min(2000, SIZE // 10 // len(unit))) + b"e"
    return b"]" + group * (SIZE // len(group)) + b"."


# Every instruction is one that writers use, and no instruction alone is repeated.
AMPLIFIED = {
    "dicts of one item": b"X\x01\x00\x00\x00aq\x00" + repeated(b"}h\x00Ns"),
    "dicts of one numbered item": repeated(b"}K\x00Ns"),
    "empty dicts": repeated(b"}}}\x80\x02"),
    "empty lists": repeated(b"]]]\x80\x02"),
    "lists of one item": repeated(b"]K\x00a"),
    "tuples in tuples": repeated(b"K\x00\x85\x85\x85\x80\x02"),
    "numbers": repeated(b"M\xff\xff"),
    "records": name("a.B") + b"q\x00)q\x01" + repeated(b"h\x00h\x01R"),
    "records of one item": name("a.B") + b"q\x00)q\x01" + repeated(b"h\x00h\x01RX\0\0\0\0Ns"),
    "records with states": name("a.B") + b"q\x00)q\x01" + repeated(b"h\x00h\x01R}b"),
    "marks": b"(\x80\x02" * (SIZE // 3),
    "names": repeated(b"ca\nB\n"),
    "memos of one value": b"Nq\x00" + b"q\x00" * (SIZE // 2) + b".",
    "empty texts": repeated(b"X\x00\x00\x00\x00"),
    "wide texts": repeated(text("\U0001f600" + "a" * 3990)),
    "equal long keys": text("x" * SIZE)
    + b"q\x00"
    + text("x" * SIZE)
    + b"q\x01}"
    + b"h\x00Nsh\x01Ns" * (SIZE // 20)
    + b".",
}
# Times the size of the pickle. Those of torch take up to 12.
MOST_MEMORY = 20


@pytest.fixture(scope="module")
def honest_s() -> float:
    """The seconds that an honest pickle of this size takes, under ``tracemalloc`` as well."""
    content = pickle.dumps({f"layer.{n}": (n, [n, "x"], {"a": n}) for n in range(1_900)}, 2)
    assert 0.9 * SIZE < len(content) < 1.1 * SIZE
    tracemalloc.start()
    began = time.process_time()
    try:
        parse(content, NAMES)
        return time.process_time() - began
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", AMPLIFIED)
def test_memory_and_time_are_proportional_to_the_pickle(
    case: str, honest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "_FREE_MEMORY", SIZE)
    content = AMPLIFIED[case]
    tracemalloc.start()
    began = time.process_time()
    try:
        value = None
        with suppress(PickleError):
            value = parse(content, NAMES, longest_text=4_000_000)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY * len(content)
        assert time.process_time() - began < 4 * honest_s
        del value
    finally:
        tracemalloc.stop()


def test_long_texts_are_refused() -> None:
    whole = tuple_of(text("a" * 10), text("b" * 10)) + b"."
    assert parse(whole, (), longest_text=10, all_texts=20) == ("a" * 10, "b" * 10)
    assert parse(whole, (), longest_text=10, all_texts=None) == ("a" * 10, "b" * 10)
    with pytest.raises(PickleError, match=r"^it holds a text of 10 bytes, and at most 9 are read$"):
        parse(whole, (), longest_text=9)
    with pytest.raises(
        PickleError, match=r"^it holds texts of 20 bytes or more in all, and at most 19 are read$"
    ):
        parse(whole, (), all_texts=19)


def test_a_text_that_is_too_long_is_refused_before_it_is_copied() -> None:
    program = text("x" * 100_000_000) + b"."
    tracemalloc.start()
    try:
        with pytest.raises(
            PickleError, match="it holds a text of 100,000,000 bytes, and at most 4,000 are read"
        ):
            parse(program, (), longest_text=4000)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_a_long_text_hides_no_flood() -> None:
    with pytest.raises(PickleError, match="it repeats instructions"):
        parse(text("x" * 10_000_000) + b"\x94" * 1_000_000 + b".", ())


def test_nested_and_repeated_values_take_no_more_memory_than_their_pickle() -> None:
    """There is no recursion and no copy: 2^60 values take 60 tuples."""
    value = parse(doubled(60) + b".", ())
    for _ in range(60):
        assert value[0] is value[1]
        value = value[0]
    assert value == ()
    assert type(parse(b"NN\x86" + b"q\x00\x85" * 30_000 + b".", ())) is tuple


@pytest.mark.parametrize(
    "error",
    [
        RecursionError("x"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc.cpp:1]. not enough memory"),
        ValueError("a\nb"),
        OSError(5, "Input/output error"),
        KeyError("dtype"),
        TypeError("unhashable type: 'list'"),
        OverflowError("too large"),
        EOFError(),
        struct.error("unpack requires a buffer of 4 bytes"),
        SafetensorError("HeaderTooLarge"),
    ],
)
def test_every_error_of_a_file_becomes_one_line(error: Exception) -> None:
    with pytest.raises(CheckpointError) as caught, reading("PLACE", "; way out"):
        raise error
    (line,) = caught.value.lines
    # Python's own MemoryError has no text at all.
    reason = {
        MemoryError: "there is not enough memory (MemoryError)",
        RuntimeError: "there is not enough memory (not enough memory)",
    }.get(type(error), f"{type(error).__name__}")
    assert line.startswith(f"PLACE cannot be read: {reason}")
    assert line.endswith("; way out")
    assert "\n" not in line


@pytest.mark.parametrize("error", [NameError, AttributeError, AssertionError, ImportError])
def test_no_file_is_accused_of_a_fault_of_this_program(error: type[Exception]) -> None:
    with pytest.raises(error), reading("PLACE"):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_and_exits_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), reading("PLACE"):
        raise error


def test_long_errors_are_cut() -> None:
    assert len(pickles.explain(ValueError("x" * 10_000))) <= 500


def test_calls_that_python_would_make_are_refused(tmp_path: Path) -> None:
    """The marker appears when Python unpickles the same bytes."""
    evil = pickle.dumps([Call(os.system, f"touch {tmp_path / 'marker'}")])
    with pytest.raises(PickleError, match=r"'posix\.system', which is refused"):
        parse(evil, NAMES)
    assert not (tmp_path / "marker").exists()
    pickle.loads(evil)
    assert (tmp_path / "marker").exists()
