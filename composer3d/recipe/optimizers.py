"""The optimizers that a recipe can have, as a table of facts. No torch here.

An optimizer is one row of this table and one file in ``training.optimizers``, which computes its
step. The row stands here because recipes, the planner, checkpoints and the converter read it, and
imports go down only. It names the code above it, which is imported when it is needed, as
``models.registry`` does it for architectures.
"""

from collections.abc import Sequence
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
        code: its class, derived from ``training.optimizers.contract.Optimizer``.
        proof: what ``verify`` compares its step with: a class derived from
            ``training.optimizers.proof.OptimizerProof``.
    """

    title: str
    state: tuple[StateTensor, ...]
    code: Reference
    proof: Reference

    def state_of(self, name: str, shape: Sequence[int]) -> tuple[StateTensor, ...]:
        """Return the state of one parameter, given its global name and its whole shape.

        It is the same for all. An optimizer that treats matrices in another way overrides this.
        """
        return self.state

    @property
    def copies(self) -> int:
        """The number of tensors of its state that are as large as the parameter."""
        return sum(not tensor.is_scalar for tensor in self.state)


DEFAULT = "adamw"

# By ``OptimTable.name``. A program with an optimizer of its own adds a row.
OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(
        title="AdamW",
        state=(
            StateTensor("exp_avg"),
            StateTensor("exp_avg_sq"),
            StateTensor("step", is_scalar=True),
        ),
        code="composer3d.training.optimizers.adamw:AdamW",
        proof="composer3d.training.optimizers.adamw_proof:AdamWProof",
    ),
}
