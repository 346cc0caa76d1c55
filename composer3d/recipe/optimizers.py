"""The optimizers that a recipe can have, as a table of facts. No torch here.

An optimizer is one row of this table and one file in ``training.optimizers``, which computes its
step. The row stands here because recipes, the planner, checkpoints and the converter read it, and
imports go down only. It names the code above it, which is imported when it is needed, as
``models.registry`` does it for architectures.
"""

from dataclasses import dataclass
from typing import NamedTuple

from composer3d.models.registry import Reference


class StateTensor(NamedTuple):
    """A tensor that an optimizer keeps for a parameter.

    Attributes:
        name: its name. A checkpoint holds it as ``optim.PARAMETER.NAME``.
        is_scalar: whether it is a float32 scalar. If not, it has the shape, the dtype and the
            placements of the parameter.
    """

    name: str
    is_scalar: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """Everything that is said of an optimizer outside of its own code.

    Attributes:
        title: its name in texts for people.
        state: what it keeps for a parameter, in the order of checkpoints.
        matrix_state: the same for one of ``recipe.matrices.matrices_of``; empty if it treats these
            as all others.
        code: its class, derived from ``training.optimizers.contract.Optimizer``.
        proof: what ``verify`` compares its step with: a class derived from
            ``training.optimizers.proof.OptimizerProof``.
    """

    title: str
    state: tuple[StateTensor, ...]
    matrix_state: tuple[StateTensor, ...] = ()
    code: Reference
    proof: Reference

    def state_of(self, *, is_matrix: bool) -> tuple[StateTensor, ...]:
        """Return what is kept for a parameter; whether it is one of ``matrices.matrices_of``."""
        return self.matrix_state if is_matrix and self.has_matrices else self.state

    @property
    def has_matrices(self) -> bool:
        """Whether it treats matrices in another way than other parameters."""
        return bool(self.matrix_state)

    def copies(self, *, is_matrix: bool) -> int:
        """Return the number of tensors of its state that are as large as the parameter."""
        return sum(not tensor.is_scalar for tensor in self.state_of(is_matrix=is_matrix))


DEFAULT = "adamw"

_ADAM_STATE = (
    StateTensor("exp_avg"),
    StateTensor("exp_avg_sq"),
    StateTensor("step", is_scalar=True),
)

# By ``OptimTable.name``. A program with an optimizer of its own adds a row.
OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(
        title="AdamW",
        state=_ADAM_STATE,
        code="composer3d.training.optimizers.adamw:AdamW",
        proof="composer3d.training.optimizers.adamw_proof:AdamWProof",
    ),
    "muon": OptimizerFacts(
        title="Muon",
        state=_ADAM_STATE,
        matrix_state=(StateTensor("momentum_buffer"),),
        code="composer3d.training.optimizers.muon:Muon",
        proof="composer3d.training.optimizers.muon_proof:MuonProof",
    ),
}
