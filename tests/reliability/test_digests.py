"""Digests see each flipped bit, and comparisons name the rank that differs."""

import pytest
import torch

from composer3d.parallel.local_gradients import GradientUnit
from composer3d.reliability.digests import (
    Digest,
    Disagreement,
    GradientDigests,
    bit_digest,
    disagreements,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("n", [1, 3, 4096, 9001])
def test_a_flipped_bit_changes_both_sums(dtype: torch.dtype, n: int) -> None:
    tensor = (100 * torch.randn(n, generator=torch.Generator().manual_seed(n))).to(dtype)
    bits = tensor.view(torch.uint8)
    whole = bit_digest(tensor)
    assert torch.equal(whole, bit_digest(tensor.clone()))
    for place in {0, len(bits) // 2, len(bits) - 1}:
        for bit in range(8):
            bits[place] ^= 1 << bit
            assert (bit_digest(tensor) != whole).all()
            bits[place] ^= 1 << bit
    assert torch.equal(whole, bit_digest(tensor))


def test_swapped_elements_and_the_sign_of_zero_are_seen() -> None:
    tensor = torch.arange(9000, dtype=torch.float64)
    whole = bit_digest(tensor)
    for a, b in ((3, 4), (3, 3 + 2048), (5, 8999)):  # in a row, in a column, in the last part
        swapped = tensor.clone()
        swapped[[a, b]] = tensor[[b, a]]
        assert not torch.equal(bit_digest(swapped), whole)
    tensor[0] = -0.0
    assert not torch.equal(bit_digest(tensor), whole)


def test_a_tensor_that_is_not_aligned_or_not_contiguous_has_the_digest_of_its_copy() -> None:
    tensor = torch.randn(64, 33)
    for view in (tensor.flatten()[1:], tensor.T, tensor[3], tensor[0, 0]):
        assert torch.equal(bit_digest(view), bit_digest(view.clone()))


def of(*values: int, what: str = "parameters", part: int = 0) -> list[list[Digest]]:
    """The digests of ranks that have the same part."""
    return [[Digest(what, (("pp", part),), (value,))] for value in values]


@pytest.mark.parametrize(
    ("values", "suspects", "has_majority"),
    [
        ((1, 1, 1), None, False),
        ((1, 2, 1), (1,), True),
        ((1, 2), (0, 1), False),
        ((1, 1, 2, 2), (0, 1, 2, 3), False),
        ((1, 2, 1, 3, 1), (1, 3), True),
        ((1, 2, 3), (0, 1, 2), False),
    ],
)
def test_a_majority_names_the_others(
    values: tuple[int, ...], suspects: tuple[int, ...] | None, has_majority: bool
) -> None:
    found = disagreements(of(*values))
    if suspects is None:
        assert found == []
        return
    assert found == [Disagreement("parameters", (("pp", 0),), suspects, tuple(range(len(values))))]
    assert found[0].has_majority == has_majority


def test_other_parts_and_other_values_are_not_compared() -> None:
    assert disagreements([*of(1, part=0), *of(2, part=1)]) == []
    assert disagreements([*of(1), *of(2, what="optimizer state")]) == []


def digest_of(gradients: dict[int, list[torch.Tensor]]) -> tuple[int, ...]:
    """The digest of a unit with these gradients, by the number of the parameter."""
    digests = GradientDigests()
    for index, parts in gradients.items():
        for part in parts:
            digests.add(GradientUnit(1, 2, "blocks.5"), index, part)
    (digest,) = digests.finish((("pp", 1),))
    assert digest[:2] == ("gradient of blocks.5", (("pp", 1), ("stage", 1), ("unit", 2)))
    return digest.value


def test_gradients_have_one_digest_for_each_unit() -> None:
    a, b = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    whole = digest_of({0: [a], 1: [b]})
    # Not the order in which they come counts, but whose they are.
    assert digest_of({1: [b], 0: [a]}) == whole
    assert digest_of({0: [b], 1: [a]}) != whole
    assert digest_of({0: [a], 3: [b]}) != whole
    # A parameter may have several gradients.
    assert digest_of({0: [a, a], 1: [b]}) != whole
    assert GradientDigests().finish(()) == []
