"""Compare what data-parallel replicas hold and compute, and name a rank that differs."""

import socket
from collections.abc import Sequence

import torch

from composer3d.data import Corpus
from composer3d.parallel import Stages
from composer3d.recipe.schema import Recipe
from composer3d.reliability.digests import (
    Digest,
    Disagreement,
    can_disagree,
    disagreements,
    state_digests,
)
from composer3d.reliability.report import RankReport
from composer3d.runtime import log, process_group
from composer3d.runtime.ranks import coordinates
from composer3d.training.batches import make_common_loader, move_to_device

LOSS = "loss"

# Ranks that a line lists at most.
_MOST_LISTED = 8


class ReplicaCheck:
    """Compares digests of state, and of one micro-batch that all data-parallel ranks compute.

    Args:
        recipe: the whole recipe.
        stages: this rank's stages.
        optimizer: from ``build_optimizer``.
        corpus: the training data, of which micro-batches are drawn.
    """

    def __init__(
        self,
        recipe: Recipe,
        stages: Stages,
        optimizer: torch.optim.Optimizer,
        corpus: Corpus,
    ) -> None:
        self._sizes = recipe.mesh
        self._stages, self._optimizer = stages, optimizer
        self._loader = make_common_loader(recipe, stages.mesh, corpus)
        self._agreed_step: int | None = None
        self._has_said_what_is_compared = False

    def check(self, step: int) -> RankReport | None:
        """Compare all ranks after ``step`` steps. Nothing that training computes changes.

        The digests of parameters and optimizer state show a bit that has changed in the memory of
        one replica. The loss of a micro-batch, computed forward on the same weights, shows
        arithmetic that is wrong. A wrong backward shows in neither: its gradients are summed over
        the replicas, and all of them take the wrong sum.

        Returns:
            On rank 0, a report if ranks differ.

        Collectives: those of ``Stages.evaluate`` for one micro-batch, and one ``gather_objects``.
        On a GPU, the host waits.
        """
        mesh = self._stages.mesh
        digests = state_digests(
            self._stages.parameters(), self._optimizer, pp_rank=mesh.coords["pp"]
        )
        digests += self._digest_of_loss(step)
        of_ranks = process_group.gather_objects(
            (digests, f"{mesh.identity} on {socket.gethostname()}")
        )
        if of_ranks is None:
            return None
        digests_of_ranks, names = zip(*of_ranks, strict=True)
        if not self._has_said_what_is_compared:
            self._has_said_what_is_compared = True
            if not can_disagree(digests_of_ranks, "parameters"):
                log.get().info(
                    "reliability.digest_every: no two ranks hold the same parameters, so only the "
                    "losses of one micro-batch are compared"
                )
        found = disagreements(digests_of_ranks)
        if not found:
            self._agreed_step = step
            return None
        lines = [self._line(disagreement, names) for disagreement in found]
        certain = [rank for entry in found if entry.has_majority for rank in entry.suspects]
        return RankReport(lines, {"corrupt_rank": certain[0]} if certain else {})

    def _digest_of_loss(self, step: int) -> list[Digest]:
        mesh = self._stages.mesh
        batch = self._loader[step]
        tokens_BT, labels_BT, positions_BT, documents_BT, _ = move_to_device(self._stages, batch)
        loss = self._stages.evaluate(tokens_BT, labels_BT, positions_BT, documents_BT)
        if not self._stages.counts_loss:
            return []
        part = tuple((axis, mesh.coords[axis]) for axis in ("pp", "cp", "tp"))
        return [Digest(LOSS, part, (int(loss.view(torch.int64)),))]

    def _line(self, found: Disagreement, names: Sequence[str]) -> str:
        what, suspects = found.what, list(found.suspects)
        if what == LOSS:
            # All ranks of a pipeline, and of its cp and tp, have computed a loss together.
            what = "loss of a micro-batch that all have computed"
            batch_ranks = {self._batch_rank(rank) for rank in suspects}
            suspects = [rank for rank in range(len(names)) if self._batch_rank(rank) in batch_ranks]
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
        return f"corruption: another {what} on {shown}, {verdict}; {advice}, without that machine"

    def _batch_rank(self, rank: int) -> tuple[int, int]:
        coords = coordinates(rank, self._sizes)
        return coords["dp_replicate"], coords["dp_shard"]
