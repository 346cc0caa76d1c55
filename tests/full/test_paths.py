"""The way of a gradient: what operators do with it is written down, by range of its storage."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer3d.full.paths import GradientPath, begin, follow, paths_of
from composer3d.full.places import digits
from composer3d.recipe.schema import MeshTable

F = torch.ops.aten


def _run(operator: Any, *arguments: Any, **keywords: Any) -> Any:
    result = operator(*arguments, **keywords)
    follow(operator.name().partition(".")[0], arguments, keywords, result)
    return result


def _gradient(name: str, size: int = 4) -> Tensor:
    gradient = torch.zeros(size)
    begin(name, gradient)
    return gradient


def _factors(tensors: Sequence[Tensor], name: str) -> list[float | None]:
    found = [paths_of(tensor).get(name) for tensor in tensors]
    return [path and path.factor for path in found]


def test_gradients_that_are_joined_and_cut_again_keep_their_ways() -> None:
    a, b = _gradient("a"), _gradient("b")
    _run(F.div_.Scalar, b, 4)
    packed = _run(F.cat.default, [a, b])
    assert paths_of(packed) == {
        "a": GradientPath(additions=1),
        "b": GradientPath(factor=0.25, additions=1),
    }
    # A part that is overwritten has another way; the rest keeps its own.
    first, second = packed[:4], packed[4:]
    _run(F.copy_.default, first, _run(F.mul.Tensor, a, 2.0))
    assert _factors([first, second], "a") == [2.0, 1.0]
    _run(F.zero_.default, second)
    assert _factors([first, second, packed], "a") == [2.0, None, 2.0]


def test_parts_with_other_ways_may_not_be_added() -> None:
    a = _gradient("a")
    _run(F.add_.Tensor, a, _gradient("a"))
    assert paths_of(a) == {"a": GradientPath(additions=2)}
    begin("a", a, frozenset(digits(MeshTable(dp_shard=1, tp=2))))
    assert paths_of(a)["a"].additions == 3
    assert [digit.axis for digit in paths_of(a)["a"].partial_over] == ["tp"]
    half = _run(F.mul.Tensor, _gradient("a"), 0.5)
    _run(F.add_.Tensor, a, half)
    assert "is added to what was not" in paths_of(a)["a"].problem


def test_what_is_added_counts_once_for_each_addition() -> None:
    a, b = _gradient("a"), _gradient("a")
    assert paths_of(_run(F.add.Tensor, a, b)) == {"a": GradientPath(additions=2)}
    assert paths_of(_run(F.add.Tensor, a, b, alpha=2))["a"].problem.startswith("what was summed")
    assert paths_of(_run(F.add.Tensor, torch.zeros(4), b, alpha=2))["a"].problem == (
        "a multiple of it is added"
    )
    assert paths_of(_run(F.neg_.default, a)) == {}


def test_an_unknown_operator_and_a_tensor_as_factor_end_a_way() -> None:
    a = _gradient("a")
    assert paths_of(_run(F.relu.default, a)) == {}
    _run(F.mul_.Tensor, a, torch.tensor(2.0))
    assert paths_of(a)["a"].problem == "it is multiplied by a tensor"


def test_a_part_without_elements_has_the_way_of_its_buffer() -> None:
    a = _gradient("a")
    assert set(paths_of(a[2:2])) == {"a"}
