"""Pickles read as data: only what torch's writers use is accepted."""

import os
import pickle
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from composer3d.checkpoint import pickles
from composer3d.checkpoint.pickles import Name, PickleError, Record, Storage, parse, reading
from composer3d.facts.errors import CheckpointError
from tests.checkpoint.assemble import (
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


# Instructions that no checkpoint has, with their operands.
SPARE = {
    "POP": b"NN0.",
    "POP_MARK": b"N(N1.",
    "DUP": b"N2.",
    "INT": b"I1\n.",
    "LONG": b"L1L\n.",
    "FLOAT": b"F1\n.",
    "STRING": b"S'x'\n.",
    "UNICODE": b"Vx\n.",
    "GET": b"Np0\ng0\n.",
    "INST": b"(ia\nB\n.",
    "OBJ": b"(" + name("a.B") + b"o.",
    "PERSID": b"Px\n.",
    "BINPERSID": b"(tQ.",
    "LIST": b"(l.",
    "DICT": b"(d.",
    "EXT1": b"\x82\x01.",
    "EXT4": b"\x84\x01\x00\x00\x00.",
    "LONG4": b"\x8b\x00\x00\x00\x7f.",
    "NEWOBJ_EX": name("a.B") + b")}\x92.",
    "EMPTY_SET": b"\x8f.",
    "FROZENSET": b"(\x91.",
    "BYTEARRAY8": b"\x96" + b"\xff" * 7 + b"\x00.",
    "BINBYTES8": b"\x8e" + b"\xff" * 7 + b"\x00.",
    "BINUNICODE8": b"\x8d" + b"\xff" * 7 + b"\x00.",
    "NEXT_BUFFER": b"\x97.",
}
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


@pytest.mark.parametrize("case", [*SPARE, *BROKEN])
def test_other_instructions_and_broken_pickles_are_refused(case: str) -> None:
    program = {**SPARE, **BROKEN}[case]
    with pytest.raises(PickleError) as caught:
        parse(program, NAMES, storages=case not in SPARE)
    assert len(str(caught.value)) < 300


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


def repeated(unit: bytes) -> bytes:
    """A list of 1 MB, to which the values of ``unit`` are appended in groups of some thousands."""
    group = b"(" + unit * max(1, min(2000, 100_000 // len(unit))) + b"e"
    return b"]" + group * (1_000_000 // len(group)) + b"."


# About 1 MB each. Every instruction is one that writers use, and no instruction alone is repeated.
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
    "marks": b"(\x80\x02" * 300_000,
    "names": repeated(b"ca\nB\n"),
    "memos of one value": b"Nq\x00" + b"q\x00" * 200_000 + b".",
    "empty texts": repeated(b"X\x00\x00\x00\x00"),
    "wide texts": repeated(text("\U0001f600" + "a" * 3990)),
    "equal long keys": text("x" * 1_000_000)
    + b"q\x00"
    + text("x" * 1_000_000)
    + b"q\x01}"
    + b"h\x00Nsh\x01Ns" * 50_000
    + b".",
}
# Times the size of the pickle. Those of torch take up to 12.
MOST_MEMORY = 20


@pytest.fixture(scope="module")
def honest_s() -> float:
    """The seconds that an honest pickle of 1 MB takes, under ``tracemalloc`` as well."""
    content = pickle.dumps({f"layer.{n}": (n, [n, "x"], {"a": n}) for n in range(18_500)}, 2)
    assert 900_000 < len(content) < 1_100_000
    tracemalloc.start()
    began = time.process_time()
    try:
        parse(content, NAMES)
        return time.process_time() - began
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", AMPLIFIED)
def test_memory_and_time_are_proportional_to_the_pickle(case: str, honest_s: float) -> None:
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
        ValueError("a\nb"),
        OSError(5, "Input/output error"),
        AssertionError(),
    ],
)
def test_every_error_of_a_file_becomes_one_line(error: Exception) -> None:
    with pytest.raises(CheckpointError) as caught, reading("PLACE", "; way out"):
        raise error
    (line,) = caught.value.lines
    lacks = "there is not enough memory (" if isinstance(error, MemoryError) else ""
    assert line.startswith(f"PLACE cannot be read: {lacks}{type(error).__name__}")
    assert line.endswith("; way out")
    assert "\n" not in line


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_and_exits_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), reading("PLACE"):
        raise error


def test_long_errors_are_cut() -> None:
    assert len(pickles.explain(ValueError("x" * 10_000))) <= 500


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("[enforce fail at alloc.cpp:1]. not enough memory"), "not enough memory"),
    ],
)
def test_a_lack_of_memory_is_called_so(error: BaseException, words: str) -> None:
    """Python's own error has no text at all."""
    assert pickles.explain(error) == f"there is not enough memory ({words})"


def test_calls_that_python_would_make_are_refused(tmp_path: Path) -> None:
    """The marker appears when Python unpickles the same bytes."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'marker'}",)

    evil = pickle.dumps([Evil()])
    with pytest.raises(PickleError, match=r"'posix\.system', which is refused"):
        parse(evil, NAMES)
    assert not (tmp_path / "marker").exists()
    pickle.loads(evil)
    assert (tmp_path / "marker").exists()
