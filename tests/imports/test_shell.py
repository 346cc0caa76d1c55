"""Shell scripts as text."""

import time

import pytest

from composer3d.imports.shell import read_script
from composer3d.spec.errors import RecipeError


def words(text: str) -> list[str]:
    """The words of the last command."""
    return read_script(text, "x.sh").commands[-1].words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\nrun $A ${A} \"$A\" '$A'", ["run", "1", "1", "1", "$A"]),
        ("A='1 2'\nrun $A \"$A\"", ["run", "1", "2", "1 2"]),
        ("A=(1 '2 3')\nA+=(4)\nrun \"${A[@]}\"", ["run", "1", "2 3", "4"]),
        ("A=(--x 1 # no\n --y)\nrun ${A[@]} ${A[*]}", ["run", *(2 * ["--x", "1", "--y"])]),
        ("A=1; A=${A}2; A+=3\nrun $A", ["run", "123"]),
        ("export N=4 M=2\nrun $((N*$M + 1)) $((N/3))", ["run", "9", "1"]),
        ('N=${X:-8} M=${1:-"a b"}\nrun $N "$M"', ["run", "8", "a b"]),
        (
            "run $UNSET ${UNSET} $1 $(date) `date` $((U*2))",
            ["run", "$UNSET", "${UNSET}", "$1", "$(date)", "`date`", "$((U*2))"],
        ),
        ("run a \\\n  b\\\n c # d\n", ["run", "a", "b", "c"]),
        ("run a#b 'c # d'", ["run", "a#b", "c # d"]),
        ('C="python x.py --lr 1"\neval "$C"', ["eval", "python", "x.py", "--lr", "1"]),
        ("if [ $X ]; then\nrun inside\nfi", ["run", "inside"]),
        ("run 'not closed", ["run", "not closed"]),
        ("A=$A$A\nrun $A", ["run", "$A$A"]),
        # Expansions nest, with quotes inside of quotes.
        (
            'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nA=1\nrun $A "$D"',
            ["run", "1", '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'],
        ),
        ("A=$((2 * (3+4))) B=$(( (4 + 4) / 2 ))\nrun $A $B", ["run", "14", "4"]),
        ("A=1 E=\nrun ${A:-${B}} ${C:-$A} ${E:-2} ${C:-$B}", ["run", "1", "1", "2", "$B"]),
        ("declare -a A=(--x 1)\nlocal -r B=2\nrun ${A[@]} $B", ["run", "--x", "1", "2"]),
        ("run a > log 2>&1", ["run", "a"]),
        ("run a &> log b &>> log2 c", ["run", "a", "b", "c"]),
        ("C='py x.py --lr 1 &> log --b'\neval $C", ["eval", "py", "x.py", "--lr", "1", "--b"]),
        ("C='py --n $(f a b) --m'\neval \"$C\"", ["eval", "py", "--n", "$(f a b)", "--m"]),
        ("A=1\nslow & A=2\nrun $A", ["run", "2"]),  # what follows one & is no condition
        ("run a 2>/dev/null b 2 >> log c2 <in", ["run", "a", "b", "2", "c2"]),
    ],
)
def test_words_of_a_command(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ('[ "$SIZE" = "7b" ]', "4096"),
        ('[[ $SIZE == "8b" ]]', "5120"),
        ('[ "$SIZE" != "8b" ]', "4096"),
        ('[ -n "$SIZE" ]', "4096"),
        ("[ -z $SIZE ]", "5120"),
        ('[[ "$SIZE" == "7b" ]] || [[ -n "$UNSET" ]]', "4096"),
        ("[ -f x ] || [ $SIZE = 7b ]", "4096"),
        ("[ $SIZE = 7b ] && [ -n $SIZE ] && [ $SIZE != 8b ]", "4096"),
        ("[ $SIZE = 8b ] && [ -f x ]", "5120"),
    ],
)
def test_known_conditions_are_decided(condition: str, value: str) -> None:
    script = read_script(
        f"SIZE=7b\nif {condition}; then\n  H=4096\nelse\n  H=5120\nfi\nrun $H", "x.sh"
    )
    assert script.commands[-1].words == ["run", value]
    assert script.undecided == []


@pytest.mark.parametrize(
    "condition",
    [
        "[ -f data ]",
        '[ "$UNSET" = 1 ]',
        '[ "$A" = 1 ] && [ -f x ]',
        '[ "$A" = 2 ] || [ -f x ]',
        "[ -f x ] && [ $A = 1 ] || [ -f y ]",
        "(( A > 0 ))",
        "grep -q x y",
    ],
)
def test_other_conditions_leave_a_variable_as_it_is(condition: str) -> None:
    script = read_script(f"A=1\nH=1\nif {condition}; then\n  H=2\nfi\nrun $H", "x.sh")
    assert script.commands[-1].words == ["run", "1"]
    (line,) = script.undecided
    assert line.startswith("x.sh:4: H is set again under a condition, which is not decided")
    assert line.endswith("its value before, 1, is used")


def test_an_assignment_after_a_test_is_not_decided() -> None:
    script = read_script("H=1\n[ -f x ] && H=2\nrun $H", "x.sh")
    assert script.commands[-1].words == ["run", "1"]
    assert len(script.undecided) == 1


def test_elif_and_nested_conditions() -> None:
    text = "S=b\nif [ $S = a ]; then H=1\nelif [ $S = b ]; then\n"
    text += " if [ $S = c ]; then H=9; fi\n H=2\nelse H=3\nfi\nrun $H"
    assert words(text) == ["run", "2"]


def test_else_after_an_undecided_branch_is_not_decided() -> None:
    text = "S=b H=1\nif [ $S = a ]; then H=2\nelif [ -f x ]; then H=3\nelse H=4\nfi\nrun $H"
    assert words(text) == ["run", "1"]


def test_here_documents_are_texts_with_variables() -> None:
    script = read_script(
        "B=8\ncat <<EOT > x.json\n{\"a\": $B}\nEOT\ncat <<'E'\n$B\nE\nrun 1", "x.sh"
    )
    assert [text for _, text in script.documents] == ['{"a": 8}', "$B"]
    assert script.documents[0][0] == 3
    assert script.commands[-1].words == ["run", "1"]


def test_lines_of_commands() -> None:
    script = read_script("\n\nrun a \\\n b\n\nA=(\n1\n)\nrun c\n", "x.sh")
    assert [command.line for command in script.commands] == [3, 9]


@pytest.mark.parametrize(
    "text",
    [
        "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 40,
        "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 10 + "run $A\n" * 1000,
    ],
)
def test_variables_that_grow_without_end_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="variables expand to more than"):
        read_script(text, "x.sh")


@pytest.mark.parametrize(
    "text",
    [
        "$((" * 20000,
        "$(" * 20000,
        "$('" * 20000,
        "${A:-" * 9999,
        "${A:-" * 9999 + "}" * 9999,
        "> " * 20000,
        "${" * 20000,
        '"' * 9999,
        "A=(" * 9999,
        "if " * 9999,
        "<<E " * 9999,
        "`" * 9999,
        "\\" * 9999,
    ],
)
def test_odd_texts_end_soon(text: str) -> None:
    begin_s = time.process_time()
    read_script(text, "x.sh")
    assert time.process_time() - begin_s < 5
