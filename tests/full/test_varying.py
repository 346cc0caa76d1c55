"""Over which axes values vary between ranks: what operators and collectives make of it."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.dryrun.collectives import Message
from composer3d.full.places import SAME, Digit, Varying, digits, digits_of, members
from composer3d.full.varying import Follower, Seams, fix, varying
from composer3d.recipe.schema import MeshTable

F = torch.ops.aten
MESH = MeshTable(pp=2, dp_replicate=2, dp_shard=4, tp=2, ep=4)
TP, LOW, HIGH, REPLICATE, PP = digits(MESH)


def _typed(digits: Varying, size: int = 4) -> Tensor:
    tensor = torch.zeros(size)
    fix(tensor, digits)
    return tensor


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Follower:
    # A group is the name of one of ``places.GROUPS`` here, of rank 0.
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda g: members(g.group_name, 0, MESH))
    return Follower(digits(MESH))


class _Group:
    def __init__(self, name: str) -> None:
        self.group_name = name

    def size(self) -> int:
        return len(members(self.group_name, 0, MESH))


def _run(follower: Follower, operator: Any, *arguments: Any, **keywords: Any) -> Any:
    result = operator(*arguments, **keywords)
    follower.follow(operator, arguments, keywords, result)
    return result


def _send(follower: Follower, operation: str, group: str, *tensors: Tensor) -> Varying:
    message = Message(operation, cast(Any, _Group(group)), None, 0)
    follower.follow_message(message, False, tensors, None)
    return varying(tensors[0])


def test_ep_cuts_an_axis_into_two_digits() -> None:
    assert digits(MESH) == (
        Digit("tp", 2, 1),
        Digit("dp_shard", 2, 2),
        Digit("dp_shard", 2, 4),
        Digit("dp_replicate", 2, 8),
        Digit("pp", 2, 16),
    )
    for group, expected in {
        "tp": {TP},
        "fsdp": {LOW, HIGH},
        "ep": {TP, LOW},
        "expert_replicas": {HIGH, REPLICATE},
        "world": {TP, LOW, HIGH, REPLICATE, PP},
    }.items():
        assert digits_of(members(group, 21, MESH), digits(MESH)) == expected
    assert digits(MeshTable(dp_shard=2, tp=3, ep=2)) == ()
    assert digits_of((0, 1, 2), digits(MESH)) == SAME


def test_what_is_computed_from_values_that_vary_varies(follower: Follower) -> None:
    over_tp, over_data, same = _typed(frozenset({TP})), _typed(frozenset({LOW})), torch.ones(4)
    assert varying(_run(follower, F.add.Tensor, over_tp, over_data)) == {TP, LOW}
    assert varying(_run(follower, F.mul.Tensor, same, 2.0)) == SAME
    assert varying(_run(follower, F.zeros_like.default, over_tp)) == SAME
    assert varying(_run(follower, F.empty_like.default, over_tp)) == SAME
    # ``to`` may make a view or a copy.
    assert varying(_run(follower, F.to.dtype, over_tp, torch.float64)) == {TP}
    assert varying(_run(follower, F.to.dtype, over_tp, torch.float32)) == {TP}
    # What is overwritten does not count, and what is changed in place does.
    changed = _run(follower, F.mul.Tensor, over_tp, 1.0)
    _run(follower, F.add_.Tensor, changed, over_data)
    assert varying(changed) == {TP, LOW}
    _run(follower, F.copy_.default, changed[:2], same[:2])
    assert varying(changed) == {TP, LOW}
    _run(follower, F.copy_.default, changed, over_data)
    assert varying(changed) == {LOW}
    _run(follower, F.add.out, same, over_tp, out=changed)
    assert varying(changed) == {TP}
    _run(follower, F.zero_.default, changed)
    assert varying(changed) == SAME


def test_collectives_make_values_the_same_or_let_them_vary(follower: Follower) -> None:
    def given() -> Tensor:
        return _run(follower, F.mul.Tensor, _typed(frozenset({TP, LOW, HIGH})), 1.0)

    assert _send(follower, "all_reduce", "fsdp", given()) == {TP}
    assert _send(follower, "all_reduce", "world", given()) == SAME
    assert _send(follower, "all_gather", "tp", torch.zeros(8), given()) == {LOW, HIGH}
    assert _send(follower, "reduce_scatter", "fsdp", torch.zeros(2), torch.ones(4)) == {LOW, HIGH}
    assert _send(follower, "all_to_all", "ep", torch.zeros(4), _typed(frozenset({HIGH}))) == {
        *(TP, LOW, HIGH)
    }
    # The calls of ``given``'s results that nothing has read.
    assert list(follower.unread.values()) == [
        *("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    ]
    arrived = torch.zeros(4)
    _send(follower, "all_gather", "tp", arrived, torch.zeros(2))
    # Neither a view nor an empty tensor of the same size is made of the values that arrived.
    _run(follower, F.view.default, arrived, [2, 2])
    _run(follower, F.empty_like.default, arrived)
    _run(follower, F.new_empty.default, arrived, [2, 2])
    assert len(follower.unread) == 6
    _run(follower, F.neg.default, arrived)
    assert len(follower.unread) == 5
    # What arrives in a ring is of the type of what is sent.
    assert _send(follower, "send", "tp", _typed(frozenset({LOW}))) == {LOW}
    assert _send(follower, "recv", "tp", torch.zeros(4)) == {TP, LOW}


def test_as_many_unread_results_are_excused_as_need_not_be_read(follower: Follower) -> None:
    _send(follower, "recv", "tp", torch.zeros(4))
    since = follower.next_number
    for operation in ("recv", "all_reduce", "recv"):
        _send(follower, operation, "tp", torch.zeros(4))
    follower.excuse("recv", 0, since)
    assert list(follower.unread.values()) == ["recv", "recv", "all_reduce", "recv"]
    follower.excuse("recv", 1, since)
    assert list(follower.unread.values()) == ["recv", "all_reduce", "recv"]
    follower.excuse("recv", 2, since)
    assert list(follower.unread.values()) == ["recv", "all_reduce"]


def test_seams_say_what_varies_too_much() -> None:
    seams = Seams()
    seams.expect("the sums", _typed(frozenset({TP})), frozenset({TP}))
    assert not [*seams]
    seams.expect("the sums", _typed(frozenset({TP, LOW, HIGH})), frozenset({TP}))
    assert [*seams] == ["the sums vary between the ranks of dp_shard"]
    assert seams.seen == 2
