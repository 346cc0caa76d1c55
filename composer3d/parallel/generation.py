"""Cut a model that generates text: the forward of new tokens, over tp alone."""

from composer3d.models import fit
from composer3d.models.contract import Decoder, ShardingPlan
from composer3d.parallel.expert import api as expert
from composer3d.parallel.pipeline.ties import find_ties, tie
from composer3d.parallel.stages import Stage
from composer3d.parallel.tensor import styles as tensor
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh


def compose_for_generation(model: Decoder, plan: ShardingPlan, mesh: Mesh) -> Stage:
    """Cut a whole model over tp for the forward of new tokens. Collective over all ranks.

    A new token cannot be cut, so there is no sequence parallelism: all ranks of tp hold all tokens
    between layers. The ranks of ep, which are those of tp, compute their own experts.

    Args:
        model: the whole model on the meta device, which is consumed.
        plan: how the model may be cut.
        mesh: a mesh without other axes than tp and ep.

    Returns:
        The only stage, on the mesh's device. Its parameters have any values.

    Raises:
        PlanError: the plan does not fit the model.
    """
    fit.check(model, plan)
    ties = find_ties(model)
    stage = Stage(model, range(len(model.blocks)), is_first=True, is_last=True)
    if mesh.tp is not None:
        parallel = ParallelTable(sequence_parallel=False, loss_parallel=False)
        tensor.apply(stage, plan, mesh.tp, parallel)
        expert.apply_to_same_tokens(stage, plan, mesh)
        tie(stage, ties)
    stage.to_empty(device=mesh.device)
    tie(stage, ties)
    return stage
