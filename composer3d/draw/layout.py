"""What each rank of a recipe holds and sends: the contents of the pictures of layouts.

Large meshes are folded: of each axis, the first ranks and the last one are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from composer3d.planner.links import Group, group_of, nic_share
from composer3d.planner.stages import StageLayers, stage_layers, stages_by_rank
from composer3d.planner.traffic import Axis, Flow, flows
from composer3d.recipe.schema import Recipe
from composer3d.runtime.ranks import coordinates

# The axes in the order in which traffic is listed, and the words for them.
AXIS_WORDS: dict[Axis, str] = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "sequence": "whole sequences (cp x tp)",
    "fsdp": "shards (dp_shard x cp)",
    "efsdp": "shards of experts",
    "dp_replicate": "replicas of shards",
    "replicas": "replicas",
    "expert_replicas": "replicas of experts",
    "pp": "pipeline",
    "stage": "a pipeline stage",
    "world": "all ranks",
}


class AxisTraffic(NamedTuple):
    """What one rank sends on one axis in a step.

    Attributes:
        axis: the axis.
        group: the ranks of the group with the first rank of the pipeline rank.
        flows: by operation and purpose.
        nic_bytes: the part of ``sent_bytes`` that leaves the node, the mean over all ranks of the
            pipeline rank.
    """

    axis: Axis
    group: Group
    flows: list[Flow]
    nic_bytes: float

    @property
    def forward_bytes(self) -> float:
        """Bytes sent in forward."""
        return sum(flow.sent_bytes for flow in self.flows if flow.phase == "forward")

    @property
    def backward_bytes(self) -> float:
        """Bytes sent in backward, and once a step."""
        return sum(flow.sent_bytes for flow in self.flows if flow.phase != "forward")

    @property
    def sent_bytes(self) -> float:
        """Bytes sent in a step."""
        return self.forward_bytes + self.backward_bytes

    @property
    def node_bytes(self) -> float:
        """The part of ``sent_bytes`` that stays inside the node."""
        return self.sent_bytes - self.nic_bytes


@dataclass(frozen=True)
class NodeLayout:
    """A recipe on nodes.

    Attributes:
        recipe: a resolved recipe.
        gpus_per_node: ranks of a node.
        is_on_cpu: whether the ranks are processes on CPUs, not GPUs.
    """

    recipe: Recipe
    gpus_per_node: int
    is_on_cpu: bool = False

    @property
    def node_link(self) -> str:
        """The name of the link inside a node."""
        return "host" if self.is_on_cpu else "NVLink"

    @cached_property
    def stages(self) -> list[StageLayers]:
        """What each pipeline stage holds, in the order of stages."""
        return stage_layers(self.recipe)

    @property
    def axes(self) -> list[Axis]:
        """The axes on which a rank sends something."""
        return [row.axis for row in self.traffic(self.busiest)]

    @cached_property
    def held_stages(self) -> list[list[int]]:
        """The stages of each pipeline rank."""
        return stages_by_rank(self.recipe)

    @property
    def nodes(self) -> int:
        """The number of nodes. The last one may not be full."""
        return -(-self.recipe.world_size // self.gpus_per_node)

    def place_of(self, rank: int) -> str:
        """Return the node of a rank, and its place in it."""
        node, place = divmod(rank, self.gpus_per_node)
        return f"node {node}, {'process' if self.is_on_cpu else 'gpu'} {place}"

    def stage_words(self, pp_rank: int) -> str:
        """Return the number of the stages that a pipeline rank holds."""
        held = self.held_stages[pp_rank]
        word = "stage" if len(held) == 1 else "stages"
        return f"{word} {', '.join(map(str, held))}"

    def layer_words(self, pp_rank: int) -> str:
        """Return the layers that a pipeline rank holds."""
        parts = []
        for stage in self.held_stages[pp_rank]:
            layers = self.stages[stage]
            parts += ["embedding"] if layers.has_first else []
            first, last = layers.blocks[0], layers.blocks[-1]
            parts.append(f"block {first}" if first == last else f"blocks {first}-{last}")
            parts += ["norm and head"] if layers.has_last else []
        return ", ".join(parts)

    def sample_words(self, batch_rank: int) -> str:
        """Return the samples of each step that a data-parallel rank reads."""
        rows = self.recipe.data.global_batch // self.recipe.mesh.batch_ranks
        first = batch_rank * rows
        if rows == 1:
            return f"sample {first} of each step"
        return f"samples {first}-{first + rows - 1} of each step"

    def token_words(self, cp_rank: int) -> str:
        """Return the tokens of each sample that a context parallel rank holds."""
        cp, tokens = self.recipe.mesh.cp, self.recipe.data.seq_len
        if self.recipe.parallel.cp_balance == "contiguous":
            part = tokens // cp
            return f"tokens {cp_rank * part}-{(cp_rank + 1) * part - 1}"
        half = tokens // (2 * cp)  # an early chunk, and the late one that balances it
        late = (2 * cp - 1 - cp_rank) * half
        return f"tokens {cp_rank * half}-{(cp_rank + 1) * half - 1}, {late}-{late + half - 1}"

    def share_words(self, rank: int) -> list[str]:
        """Return what a rank holds of its layers, a line for each technique."""
        mesh, shape = self.recipe.mesh, self.recipe.model
        at = coordinates(rank, mesh)
        lines = []
        if mesh.tp > 1:
            heads = shape.n_heads // mesh.tp
            first = at["tp"] * heads
            words = f"head {first}" if heads == 1 else f"heads {first}-{first + heads - 1}"
            lines.append(f"{words} of {shape.n_heads}")
        place = rank % (mesh.dp_shard * mesh.cp * mesh.tp)
        if mesh.ep > 1:
            experts = shape.experts // mesh.ep
            first = place % mesh.ep * experts
            words = f"expert {first}" if experts == 1 else f"experts {first}-{first + experts - 1}"
            lines.append(f"{words} of {shape.experts}")

        shards = 1 if self.recipe.parallel.zero == 0 else mesh.dp_shard * mesh.cp
        shard = f"shard {at['dp_shard'] * mesh.cp + at['cp']} of {shards}"
        if self._shards_experts_apart:
            lines.append(f"experts: shard {place // mesh.ep} of {mesh.efsdp}")
            lines.append(f"the rest: {shard if shards > 1 else 'all of these'}")
        elif shards > 1:
            lines.append(shard)
        else:
            is_part = mesh.pp * mesh.tp * mesh.ep > 1
            lines.append("all of these weights" if is_part else "all weights")
        return lines

    @property
    def _shards_experts_apart(self) -> bool:
        """Whether the shards of experts are not those of the other weights.

        Ranks of tp share the shards of experts, which tp does not cut, and ranks of ep do not.
        """
        mesh = self.recipe.mesh
        has_shards = self.recipe.parallel.zero > 0 and mesh.efsdp > 1
        return bool(self.recipe.model.experts) and has_shards and mesh.tp * mesh.ep > 1

    def traffic(self, pp_rank: int) -> list[AxisTraffic]:
        """Return what a rank of a pipeline rank sends in a step, by axis."""
        return self._traffic_by_pp_rank[pp_rank]

    @cached_property
    def _traffic_by_pp_rank(self) -> list[list[AxisTraffic]]:
        return [self._traffic_of(pp_rank) for pp_rank in range(self.recipe.mesh.pp)]

    def _traffic_of(self, pp_rank: int) -> list[AxisTraffic]:
        found = flows(self.recipe, pp_rank)
        rows = []
        for axis in AXIS_WORDS:
            own = [flow for flow in found if flow.axis == axis]
            if not own:
                continue
            group = group_of(axis, self.recipe.mesh, pp_rank)
            nic_bytes = sum(
                flow.sent_bytes * nic_share(flow, self.recipe.mesh, pp_rank, self.gpus_per_node)
                for flow in own
            )
            rows.append(AxisTraffic(axis, group, own, nic_bytes))
        return rows

    @cached_property
    def busiest(self) -> int:
        """The pipeline rank that sends the most bytes; the first of equal ones."""
        totals = [sum(row.sent_bytes for row in rows) for rows in self._traffic_by_pp_rank]
        return totals.index(max(totals))

    def most_sent(self, axis: Axis) -> tuple[float, float]:
        """Return the most bytes that any rank sends on an axis, in forward and in backward.

        In a pipeline they can be those of two ranks: the first one sends no gradients, and the
        last one no activations.
        """
        rows = [row for rows in self._traffic_by_pp_rank for row in rows if row.axis == axis]
        return (
            max((row.forward_bytes for row in rows), default=0.0),
            max((row.backward_bytes for row in rows), default=0.0),
        )


def make_layout(recipe: Recipe, gpus_per_node: int, *, is_on_cpu: bool | None = None) -> NodeLayout:
    """Return the layout of a recipe.

    Args:
        recipe: a resolved recipe.
        gpus_per_node: ranks of a node.
        is_on_cpu: whether the ranks are on CPUs; None: if the recipe says so.

    Raises:
        PlanError: the schedule cannot run.
    """
    if is_on_cpu is None:
        is_on_cpu = recipe.run.device == "cpu"
    layout = NodeLayout(recipe, gpus_per_node, is_on_cpu)
    _ = layout.busiest  # raises here what the pictures would raise later
    return layout


def fold(size: int, limit: int) -> tuple[int, ...]:
    """Return the positions of an axis that are shown, in order: the first ones and the last one.

    Args:
        size: the number of all positions.
        limit: the most that are shown.
    """
    if size <= limit:
        return tuple(range(size))
    if limit < 2:
        return (0,)
    return (*range(limit - 1), size - 1)


def operation_words(found: Sequence[Flow]) -> str:
    """Return the operations of a list of flows: "128 all-gather, 64 send"."""
    counts: dict[str, int] = {}
    for flow in found:
        words = flow.operation.replace("_", "-")
        counts[words] = counts.get(words, 0) + flow.count
    return ", ".join(f"{count:,} {words}" for words, count in counts.items())
