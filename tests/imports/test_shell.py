"""Shell scripts as text."""

import time

import pytest

from composer3d.facts.errors import RecipeError
from composer3d.imports.shell import read_script


def words(text: str) -> list[str]:
    """The words of the last command."""
    return [word.text for word in read_script(text, "x.sh").commands[-1].words]


def unsure(text: str) -> dict[str, str]:
    """Each word of the last command that has unsure variables, and these."""
    found = read_script(text, "x.sh").commands[-1].words
    return {word.text: " ".join(sorted(word.unsure)) for word in found if word.unsure}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\nrun $A ${A} \"$A\" '$A'", ["run", "1", "1", "1", "$A"]),
        ("A='1 2'\nrun $A \"$A\"", ["run", "1", "2", "1 2"]),
        ("A=(1 '2 3')\nA+=(4)\nrun \"${A[@]}\"", ["run", "1", "2 3", "4"]),
        ("A=(--x 1 # no\n --y)\nrun ${A[@]} ${A[*]}", ["run", *(2 * ["--x", "1", "--y"])]),
        ("A=1; A=${A}2; A+=3\nrun $A", ["run", "123"]),
        ("export N=4 M=2\nrun $N $M", ["run", "4", "2"]),
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
        # Nothing is computed.
        ("A=$((2 * (3+4))) N=2\nrun $A $((N/3))", ["run", "$((2 * (3+4)))", "$((N/3))"]),
        ("A=1\nfor A in 1 2; do\nrun $A\ndone", ["run", "$A"]),
        ("A=1 B=2\nread A\n((B += 1))\nrun $A $B", ["run", "$A", "$B"]),
        ("A=1 B=(1 2)\nunset A; B[0]=3\nrun $A ${B[@]}", ["run", "$A", "${B[@]}"]),
        ("A=1 B=2\nprintf -v A 3\nIFS=, read -r B C\nrun $A $B", ["run", "$A", "$B"]),
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
    ("text", "expected"),
    [
        # A value before is kept; else it is the last one.
        ("A=1\nif [ 1 = 1 ]; then\nA=2\nfi\nrun $A", {"1": "A"}),
        ("if [ 1 = 1 ]; then A=1; else A=2; fi\nrun $A", {"2": "A"}),
        ("case $S in a) A=1;; b) A=2;; esac\nrun $A", {"2": "A"}),
        ("A=1\nwhile true; do A=2; done\nrun $A", {"1": "A"}),
        ("A=1\nset_a() { A=2; }\nrun $A", {"1": "A"}),
        ("A=1\n( A=2 )\nrun $A", {"1": "A"}),
        ("A=1\n[ -f x ] && A=2\nrun $A", {"1": "A"}),
        ("A=1\ntrue || A=2\nrun $A", {"1": "A"}),
        ("[ -f x ] && A=1 && B=2\nrun $A $B", {"1": "A", "2": "B"}),
        # What is the same, or set again below, is sure; so is what follows an assignment and &&.
        ("A=1\nif x; then A=1; fi\nrun $A", {}),
        ("A=1\nif x; then A=2; fi\nA=3\nrun $A", {}),
        ("A=1 && B=2\nrun $A $B", {}),
        # Each word tells of what is in it, through other variables, quotes and arrays.
        ('if x; then A=1; fi\nB="--a $A --b 2"\nrun $B', {"1": "A"}),
        ('if x; then A=\'1 2\'; fi\nB=("$A" 3)\nrun "${B[@]}"', {"1 2": "A"}),
        ("if x; then A=1; fi\nif y; then B=2$A; fi\nrun --x=$B", {"--x=21": "A B"}),
        ("if x; then A=; fi\nrun ${A:-3} b", {"3": "A"}),
        # A word that may be there or not.
        ("A=\nif x; then A=--b; fi\nrun $A", {"": "A"}),
        ('A=()\nif x; then A+=(--b); fi\nrun "${A[@]}"', {"": "A"}),
        ("A=1\nif x; then A=2; fi\ncat <<E\n$A\nE\nrun 1", {}),
        # What is not run may set any variable before it.
        ("A=1\nsource x\nB=$A\nrun $B", {"1": "A"}),
        ("A=1\n[ -f x ] && . x\nrun $A", {"1": "A"}),
        ('A=1\neval "$C"\nrun $A', {"1": "A"}),
        ("A=1\nexport B=2 $(cat x)\nrun $A $B", {"1": "A", "2": "B"}),
        ('A=1\nexport "A=2"\nrun $A', {"1": "A"}),
        ("A=1\nsource x\nA=2\nrun $A", {}),
        ("A=1\nexport A\neval run $A", {}),
    ],
)
def test_what_depends_on_a_condition_is_unsure(text: str, expected: dict[str, str]) -> None:
    assert unsure(text) == expected


def test_an_unsure_variable_has_a_line() -> None:
    script = read_script("H=1\nif x; then\n  H=2\nfi\nif y; then\n  G=3\nfi\nrun $H $G", "x.sh")
    assert list(script.unsure.values()) == [
        "x.sh:3: H is set again under a condition, which is not decided: its value before, 1, is "
        "used",
        "x.sh:6: G is set under a condition, which is not decided: its last value, 3, is used",
    ]
    assert script.others == {"H": ["2"], "G": ["3"]}


@pytest.mark.parametrize(
    ("text", "found", "unsure"),
    [
        # A document has the variables of its place.
        ("A=1\ncat <<E\n$A\nE\nA=2", "1", ""),
        ("A=1\ncat <<E; A=2\n$A\nE\nA=3", "1", ""),
        ("A=1\ncat <<'E'\n$A\nE\nA=2", "$A", ""),
        ("cat <<E\n$A\nE\nA=2", "$A", ""),
        ("A=1\nif x; then\ncat <<E\n$A\nE\nfi", "1", ""),
        # A function may be called below.
        ("A=1\nf() { cat <<E; }\n$A\nE\nA=2\nf", "2", "A"),
        ("f() {\ncat <<E\n$A\nE\n}\nA=2\nf", "2", "A"),
    ],
)
def test_a_here_document_has_the_variables_of_its_place(text: str, found: str, unsure: str) -> None:
    ((_, document),) = read_script(text, "x.sh").documents
    assert (document.text, "".join(document.unsure)) == (found, unsure)


def test_here_documents_are_texts_with_variables() -> None:
    script = read_script(
        "B=8\ncat <<EOT > x.json\n{\"a\": $B}\nEOT\ncat <<'E'\n$B\nE\nrun 1", "x.sh"
    )
    assert [found.text for _, found in script.documents] == ['{"a": 8}', "$B"]
    assert script.documents[0][0] == 3
    assert [word.text for word in script.commands[-1].words] == ["run", "1"]


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
        "".join(f"A{number}=1\n. x\n" for number in range(9999)),
        "`" * 9999,
        "\\" * 9999,
    ],
)
def test_odd_texts_end_soon(text: str) -> None:
    begin_s = time.process_time()
    read_script(text, "x.sh")
    assert time.process_time() - begin_s < 5
