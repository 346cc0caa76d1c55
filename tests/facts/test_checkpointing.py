"""The values of ``memory.activation_checkpoint``."""

import pytest

from composer3d.facts.checkpointing import CheckpointedBlocks, Checkpointing, parse_checkpointing
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.schema import MemoryTable


def test_the_first_of_every_so_many_blocks_is_checkpointed() -> None:
    found = MemoryTable(activation_checkpoint="every 3 blocks").checkpointing
    assert found == Checkpointing("full", CheckpointedBlocks(3))
    modes = [found.mode_of(place, 5) for place in range(7)]
    assert modes == ["full", "none", "none", "full", "none", "none", "full"]
    selective = MemoryTable(activation_checkpoint="selective").checkpointing
    assert {selective.mode_of(place, 5) for place in range(7)} == {"selective"}
    assert parse_checkpointing("every 1 blocks") == parse_checkpointing("full")


@pytest.mark.parametrize("text", ["selective", "full", "every 2 blocks"])
def test_blocks_of_the_first_stages_are_checkpointed(text: str) -> None:
    found = MemoryTable(activation_checkpoint=f"{text} in the first 3 stages").checkpointing
    assert str(found) == f"{text} in the first 3 stages"
    assert str(found.in_first(None)) == text
    mode = "selective" if text == "selective" else "full"
    assert [found.mode_of(0, stage) for stage in range(5)] == [mode] * 3 + ["none"] * 2
    assert found.mode_of(1, 0) == ("none" if "every" in text else mode)


@pytest.mark.parametrize(
    "text",
    [
        "", "every", "Full", "every 0 blocks", "every two blocks", "every 2 blocks ",
        "every  2 blocks", "every \u0662 blocks", "every 02 blocks", "every 10001 blocks",
        "every 2 layers", "none in the first 2 stages", "full in the first 0 stages",
        "full in the first 2", "full in 2 stages", "full in the first 10001 stages",
    ],
)  # fmt: skip
def test_other_texts_have_no_meaning(text: str) -> None:
    assert parse_checkpointing(text) is None
    with pytest.raises(ValueError, match="N and M are from 1 to 10_000"):
        assert MemoryTable(activation_checkpoint=text).checkpointing


def test_a_value_in_a_line_of_overrides_may_have_spaces() -> None:
    line = " mesh.tp=2  memory.activation_checkpoint=every 2 blocks parallel.stages=[1, 2]\t"
    assert split_overrides(line) == [
        "mesh.tp=2",
        "memory.activation_checkpoint=every 2 blocks",
        "parallel.stages=[1, 2]",
    ]
    assert split_overrides("") == []
