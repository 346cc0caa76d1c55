"""Compare what data-parallel replicas hold and compute, and name a rank that differs."""

import socket
from collections.abc import Iterator, Sequence
from enum import Enum, auto

import torch

from composer3d.data import Blend, Corpus
from composer3d.parallel import Stages
from composer3d.parallel.local_gradients import see_local_gradients
from composer3d.recipe.schema import Recipe
from composer3d.reliability.digests import (
    Digest,
    Disagreement,
    GradientDigests,
    can_disagree,
    disagreements,
    state_digests,
)
from composer3d.reliability.report import Report
from composer3d.runtime import log, process_group
from composer3d.runtime.ranks import coordinates
from composer3d.training.batches import make_common_loader, move_to_device
from composer3d.training.observers.observer import Observer

_LOSS = "loss"

# Ranks that a line lists at most.
_MOST_LISTED = 8


class Repeats(Enum):
    """What healthy replicas compute with the same bits from the same micro-batch."""

    NOTHING = auto()
    FORWARD = auto()
    ALL = auto()


def what_repeats(device: str, *, is_deterministic: bool, tp: int) -> Repeats:
    """Return what replicas on devices of the type ``device`` compute with the same bits.

    By default, the backward of attention on a GPU adds in another order each time. Sums over tp
    may be made in the switch (NVLS), in an order that differs between groups of tp, and even
    between calls (NCCL issues 1497 and 2360). A sum of two terms has no order.
    """
    if device == "cpu" or is_deterministic:
        return Repeats.ALL
    return Repeats.FORWARD if tp <= 2 else Repeats.NOTHING


class ReplicaCheck(Observer):
    """Compares digests of state, and of one micro-batch that all data-parallel ranks compute.

    It does so every ``reliability.digest_every`` steps.

    Args:
        recipe: the whole recipe.
        stages: this rank's stages.
        optimizer: from ``build_optimizer``.
        corpus: the training data, of which micro-batches are drawn.
        observers: get, on rank 0, a report if ranks differ; and the time that a comparison takes.
    """

    def __init__(
        self,
        recipe: Recipe,
        stages: Stages,
        optimizer: torch.optim.Optimizer,
        corpus: Corpus | Blend,
        observers: Observer,
    ) -> None:
        self._every = recipe.reliability.digest_every
        self._observers = observers
        self._sizes = recipe.mesh
        self._stages, self._optimizer = stages, optimizer
        self._loader = make_common_loader(recipe, stages.mesh, corpus)
        self._repeats = what_repeats(
            stages.mesh.device.type, is_deterministic=recipe.run.deterministic, tp=recipe.mesh.tp
        )
        # The last step before the first disagreement. Ranks that agree again later prove nothing:
        # a machine may lie only now and then, and a checkpoint of wrong weights is one for all.
        self._agreed_step: int | None = None
        self._has_disagreed = False
        self._has_said_what_is_compared = False

    def check_state(self, step: int) -> None:
        if step % self._every:
            return
        with self._observers.phase("replicas"):
            report = self.check(step)
        if report is not None:
            self._observers.report(step, report)

    def check(self, step: int) -> Report | None:
        """Compare all ranks after ``step`` steps. Nothing that training computes changes.

        The digests of parameters and optimizer state show a bit that has changed in the memory of
        one replica. The loss and the gradients of a micro-batch, computed on the same weights, show
        arithmetic that is wrong. In training itself it shows in neither state: gradients are summed
        over the replicas, and all of them take the wrong sum.

        Returns:
            On rank 0, a report if ranks differ.

        Collectives: those of ``see_local_gradients``, or of ``Stages.evaluate`` if
        gradients are not the same bits on all replicas, or none if the loss is not either; and one
        ``gather_objects``. On a GPU, the host waits.
        """
        mesh = self._stages.mesh
        digests = state_digests(
            self._stages.parameters(), self._optimizer, pp_rank=mesh.coords["pp"]
        )
        digests += self._digests_of_micro_batch(step)
        of_ranks = process_group.gather_objects(
            (digests, f"{mesh.identity} on {socket.gethostname()}")
        )
        if of_ranks is None:
            return None
        digests_of_ranks, names = zip(*of_ranks, strict=True)
        if not self._has_said_what_is_compared:
            self._has_said_what_is_compared = True
            for line in self._omissions(digests_of_ranks):
                log.get().info(f"reliability.digest_every: {line}")
        found = self._causes(disagreements(digests_of_ranks))
        if not found:
            if not self._has_disagreed:
                self._agreed_step = step
            return None
        self._has_disagreed = True
        lines = [self._line(disagreement, names) for disagreement in found]
        certain = [rank for entry in found if entry.has_majority for rank in entry.suspects]
        return Report(lines, {"corrupt_rank": certain[0]} if certain else {})

    def _digests_of_micro_batch(self, step: int) -> list[Digest]:
        if self._repeats is Repeats.NOTHING:
            return []
        mesh = self._stages.mesh
        batch = self._loader[step]
        inputs = move_to_device(self._stages, batch)
        # These ranks compute the same. Ranks of one group of ep do not: the rows of a product may
        # depend on their place among the rows of all ranks that an expert multiplies.
        part = (
            *((axis, mesh.coords[axis]) for axis in ("pp", "cp", "tp")),
            ("ep", mesh.rank % self._sizes.ep),
        )
        gradients = GradientDigests()
        devices = [mesh.device] if mesh.device.type != "cpu" else []
        # A model of one's own may draw random numbers.
        with torch.random.fork_rng(devices, device_type=mesh.device.type):
            torch.manual_seed(step)
            if self._repeats is Repeats.ALL:
                loss = see_local_gradients(self._stages, *inputs[:5], see=gradients.add)
            else:
                loss = self._stages.evaluate(*inputs[:4])
        digests = gradients.finish(part)
        if self._stages.counts_loss:
            digests.append(Digest(_LOSS, part, (int(loss.view(torch.int64)),)))
        return digests

    def _omissions(self, of_ranks: Sequence[Sequence[Digest]]) -> Iterator[str]:
        """Say what no two ranks have in common, and what therefore is not compared."""
        if not can_disagree(of_ranks, "parameters"):
            yield (
                "no two ranks hold the same parameters, so only what they compute with them is "
                "compared"
            )
        if self._repeats is Repeats.NOTHING:
            yield (
                "no arithmetic is compared: with mesh.tp > 2, each group of tp may add in another "
                "order on GPUs without run.deterministic = true"
            )
        elif not can_disagree(of_ranks, _LOSS):
            yield (
                "all data-parallel ranks share experts (mesh.ep), so no two of them compute the "
                "same, and no arithmetic is compared"
            )
        elif self._repeats is Repeats.FORWARD:
            yield (
                "backward is not compared: its bits differ from call to call on a GPU without "
                "run.deterministic = true"
            )

    def _causes(self, found: list[Disagreement]) -> list[Disagreement]:
        """Keep what can have caused the others.

        Wrong parameters and a wrong forward make all gradients of their replica wrong. A gradient
        that is wrong in backward makes those wrong that backward comes to later.
        """
        others = [entry for entry in found if not _is_gradient(entry)]
        explained = {self._batch_rank(rank) for entry in others for rank in entry.suspects}
        gradients = [
            entry
            for entry in found
            if _is_gradient(entry)
            and explained.isdisjoint(self._batch_rank(rank) for rank in entry.suspects)
        ]
        first = max(map(_place_of, gradients), default=None)
        causes = [entry for entry in gradients if _place_of(entry) == first]
        return others + _joined(causes)

    def _line(self, found: Disagreement, names: Sequence[str]) -> str:
        what, suspects = found.what, list(found.suspects)
        if what == _LOSS:
            # All ranks of a pipeline, and of its cp and tp, have computed a loss together.
            what = "loss of a micro-batch that all have computed"
            batch_ranks = {self._batch_rank(rank) for rank in suspects}
            suspects = [rank for rank in range(len(names)) if self._batch_rank(rank) in batch_ranks]
        elif _is_gradient(found):
            what = f"{what}, of a micro-batch that all have computed,"
        shown = "; ".join(names[rank] for rank in suspects[:_MOST_LISTED])
        if len(suspects) > _MOST_LISTED:
            shown += f"; and {len(suspects) - _MOST_LISTED} more"
        if found.has_majority:
            verdict = "against most of the ranks that must have the same bits"
        else:
            verdict = "and no majority shows which of them is wrong"
        if self._agreed_step is None:
            advice = "resume from a checkpoint that is older than this run of the program"
        else:
            advice = (
                f"all agreed after step {self._agreed_step}: resume from a checkpoint that is not "
                "newer"
            )
        differing = f"other {what}" if what == "parameters" else f"another {what}"
        return f"corruption: {differing} on {shown}, {verdict}; {advice}, without that machine"

    def _batch_rank(self, rank: int) -> tuple[int, int]:
        coords = coordinates(rank, self._sizes)
        return coords["dp_replicate"], coords["dp_shard"]


def _is_gradient(found: Disagreement) -> bool:
    return "unit" in dict(found.part)


def _joined(gradients: Sequence[Disagreement]) -> list[Disagreement]:
    """Join disagreements about one unit on several ranks of cp and tp, for one line."""
    joined = []
    for has_majority in (True, False):
        entries = [entry for entry in gradients if entry.has_majority == has_majority]
        if entries:
            suspects = sorted(rank for entry in entries for rank in entry.suspects)
            ranks = sorted(rank for entry in entries for rank in entry.ranks)
            joined.append(entries[0]._replace(suspects=tuple(suspects), ranks=tuple(ranks)))
    return joined


def _place_of(gradient: Disagreement) -> tuple[int, int]:
    """Return the place of a gradient's unit in the model: backward begins with the largest."""
    part = dict(gradient.part)
    return part["stage"], part["unit"]
