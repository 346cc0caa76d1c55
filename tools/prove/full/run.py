"""Plant faults of communication, and look for them with the checks of ``verify --full`` alone.

No number is computed: neither the shrunk proof nor any other check looks. There are four lists.

- planted: those of ``tools/prove/faults`` that are about what ranks send each other, or about sums
  over ranks, but for those that change values alone (``OF_VALUES``).
- values: these, which the shrunk proof finds, and these checks need not.
- by rule: each way to spoil a call, at each kind of call of a step (``spoil``).
- at scale: faults that do nothing on a small mesh (``at_scale``). On the small layout the checks
  must find nothing.

Each layout is also checked without a fault, and nothing may be found.

Exit status: 0 if all faults at scale are found, at least 95% of those planted and of those by rule,
and no fault where there is none; else 1.
"""

import inspect
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer3d.facts.errors import UserError
from composer3d.full.check import check_structure
from composer3d.full.predicates import completed
from composer3d.recipe.draft import split_overrides
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool, WorkerError
from tools.prove.faults.plant import Plant
from tools.prove.paths import MOE_RECIPE, RECIPE
from tools.prove.proof import add_names, choose, make_parser

_LEAST = 0.95
_NOT_PLANTED = "the fault cannot be planted: "

# Of tools/prove/faults, by their names.
_NAMES = """
    repeat_own_shard_of_the_sequence keep_own_part_of_the_sum drop_sum_of_gradients
    sum_gradients_twice drop_sum_of_outputs reduce_over_the_wrong_group
    take_own_mean_in_wide_norms keep_own_gradient_of_means drop_reduction_of_norms
    drop_reduction_of_gates leave_out_a_norm sum_a_norm_twice keep_own_share_of_kv_gradients
    count_kv_gradients_on_every_rank keep_own_maximum_of_logits keep_own_sum_of_exponentials
    drop_reduce_scatter reduce_shards_twice send_gradients_in_bfloat16 send_gradients_wide
    drop_all_reduce_of_replicas all_reduce_replicas_twice reduce_only_the_last_micro_batch
    reduce_what_was_reduced lose_units_of_several_blocks reduce_only_the_first_block_of_a_unit
    attend_to_own_tokens lose_the_hop_of_keys lose_the_hop_of_keys_in_backward
    lose_the_hop_of_key_gradients divide_expert_gradients_by_efsdp
    reduce_experts_over_the_shards_only drop_reduction_of_routers keep_gradients_of_sent_tokens
    count_own_part_of_the_sequence shard_experts_over_dense_ranks move_biases_by_own_counts
    lose_a_gradient_between_stages double_the_gradients_between_stages
    receive_the_activations_of_another_micro_batch swap_the_middle_stages
    lose_a_deferred_gradient run_a_deferred_gradient_twice lose_the_gradient_of_the_tied_copy
    train_the_tied_copy sum_gradients_of_latents_twice drop_reduction_of_down_projections
    orthogonalise_shards divide_by_own_tokens clip_by_own_norm
    keep_the_gradient_of_the_embedding divide_depths_by_own_counts
"""
PLANTED = frozenset(_NAMES.split())
# Those that send the same bytes to the same ranks and change values alone: what is sent is in
# another order, is scaled, belongs to another place, is overwritten while it is read, or is that of
# the step before. The shrunk proof finds them.
_VALUE_NAMES = """
    choose_by_another_rank count_tokens_on_every_tp_rank double_the_divisor
    exchange_the_wrong_heads gather_the_first_parameters_for_ever gather_the_sequence_backwards
    join_the_parts_as_if_cut_in_order leave_out_a_replica leave_the_tied_copy_behind
    multiply_expert_gradients_by_ep norm_of_the_first_rank reduce_scatter_twice
    return_tokens_in_another_order send_the_part_of_the_owner use_one_buffer_for_the_ring
"""
OF_VALUES = frozenset(_VALUE_NAMES.split())
_DATA = "mesh.dp_replicate=2 mesh.dp_shard=2"
_TP = "mesh.dp_shard=2 mesh.tp=2"
_EP = "mesh.dp_shard=2 mesh.tp=2 mesh.ep=2 model.balance_loss=0.01"
# By layout: the operations and groups whose calls are spoiled.
BY_RULE = (
    (RECIPE, _DATA, ("all_gather fsdp", "reduce_scatter fsdp", "all_reduce dp_replicate")),
    (RECIPE, _TP, ("all_gather tp", "reduce_scatter tp", "all_reduce tp", "all_reduce world")),
    (RECIPE, f"{_TP} parallel.sequence_parallel=false", ("all_reduce tp",)),
    (RECIPE, "mesh.dp_replicate=2 mesh.tp=2 parallel.zero=0", ("all_reduce replicas",)),
    (RECIPE, "mesh.dp_shard=2 mesh.tp=2 precision.reduce=bfloat16", ("all_to_all fsdp",)),
    (
        RECIPE,
        "mesh.dp_shard=2 mesh.cp=2 parallel.cp_method=allgather",
        ("all_gather cp", "reduce_scatter cp"),
    ),
    (RECIPE, "mesh.dp_shard=2 mesh.cp=2 parallel.cp_method=ulysses", ("all_to_all cp",)),
    (RECIPE, "mesh.dp_shard=2 mesh.cp=3 data.seq_len=252", ("message cp",)),
    (RECIPE, "mesh.pp=3 mesh.dp_shard=2 model.n_layers=3 data.global_batch=16", ("message pp",)),
    (
        MOE_RECIPE,
        _EP,
        ("all_to_all ep", "all_gather efsdp", "reduce_scatter efsdp", "all_reduce sequence"),
    ),
    (RECIPE, "optim.name=muon mesh.pp=2 mesh.dp_shard=2", ("all_to_all stage",)),
)


class Case(NamedTuple):
    """A fault to look for, or none, in a layout."""

    kind: str
    name: str
    recipe: Recipe
    plant: Plant | None
    is_fault: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class NotPlantedError(Exception):
    """A fault could not be planted, or its layout ends in an error without it, too."""


@dataclass
class _Planting:
    """Plants a fault; tells an error of planting it from one that the fault causes."""

    plant: Plant

    def __call__(self) -> None:
        try:
            self.plant()
        except Exception as error:
            raise RuntimeError(f"{_NOT_PLANTED}{type(error).__name__}: {error}") from error


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("full", __doc__)
    add_names(parser, "kind (planted, values, rule, scale, clean) or name of a fault")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    found, all_of, wrong = Counter[str](), Counter[str](), 0
    cases = choose(parser, cases_of_all_kinds(), options.names, "no case's kind or name holds")
    with Pool() as pool:
        for case in cases:
            title = str(case)
            finding = look(pool, case)
            all_of[case.kind] += 1
            is_right = (finding is not None) == case.is_fault
            found[case.kind] += is_right
            wrong += not is_right and not case.is_fault
            word = "right" if is_right else "WRONG" if not case.is_fault else "MISSED"
            print(f"{word:6} {title}: {finding or 'nothing'}", flush=True)
    for kind, number in all_of.items():
        print(f"{kind}: {found[kind]} of {number}")
    print(f"in {(time.monotonic() - begin) / 60:.0f} minutes")
    least = {"scale": 1.0, "clean": 1.0, "values": 0.0}
    return int(any(found[kind] < least.get(kind, _LEAST) * all_of[kind] for kind in all_of))


def look(pool: Pool, case: Case) -> str | None:
    """Return what the checks find in a layout with a planted fault; None: nothing.

    Raises:
        NotPlantedError: nothing was found, because no fault was looked for.
    """
    plant = _Planting(case.plant or _nothing)
    try:
        small = [case.recipe, *completed(case.recipe, [case.recipe])]
        structure = check_structure(pool, case.recipe, small, plant=plant)
    except (UserError, WorkerError) as error:
        if _NOT_PLANTED in str(error):
            raise NotPlantedError(f"{case}: {error}") from error
        if case.plant is not None and look(pool, case._replace(plant=None)) is not None:
            raise NotPlantedError(f"{case}: without the fault, too: {error}") from error
        return f"error raised: {str(error).strip().splitlines()[-1]}"
    return str(structure.findings[0]) if structure.findings else None


def _nothing() -> None:
    """Plant no fault."""


def cases_of_all_kinds() -> list[Case]:
    """Return all cases.

    Raises:
        LookupError: a name of ``PLANTED`` or ``OF_VALUES`` is that of no fault.
    """
    cases = [*_cases()]
    named = {case.plant.__name__ for case in cases if inspect.isfunction(case.plant)}
    unknown = (PLANTED | OF_VALUES) - named
    if unknown:
        raise LookupError(f"no fault of tools/prove/faults is called {', '.join(sorted(unknown))}")
    return cases


def _cases() -> Iterator[Case]:
    from tools.prove.faults.table import FAULTS
    from tools.prove.full.at_scale import FAULTS as AT_SCALE
    from tools.prove.full.spoil import ANY, HALF, OF_MESSAGES, OF_REDUCTIONS, WRONG_NEIGHBOUR, Spoil

    for path, layout, _ in BY_RULE:
        yield Case("clean", layout, _load(path, layout), None, is_fault=False)
    for fault in AT_SCALE:
        name = fault.plant.__name__
        yield Case("scale", name, _load(fault.recipe, fault.large), fault.plant, is_fault=True)
        small = _load(fault.recipe, fault.small)
        yield Case("clean", f"{name} at {fault.small}", small, fault.plant, is_fault=False)
        large = _load(fault.recipe, fault.large)
        yield Case("clean", f"no fault at {fault.large}", large, None, is_fault=False)
    for path, layout, calls in BY_RULE:
        recipe = _load(path, f"data.global_batch=8 {layout}")
        for call in calls:
            operation, group = call.split()
            ways = (*(OF_MESSAGES if operation == "message" else ANY), HALF)
            if group == "cp" and operation == "message":
                ways += (WRONG_NEIGHBOUR,)  # a group of pp has one neighbour
            ways += OF_REDUCTIONS if "reduce" in operation else ()
            for way in ways:
                spoil = Spoil(way, operation, group, recipe.mesh)
                yield Case("rule", f"{spoil} ({layout})", recipe, spoil, is_fault=True)
    for planted in FAULTS:
        name = planted.plant.__name__
        if planted.check == "verify" and name in PLANTED | OF_VALUES:
            recipe = _load(planted.recipe, planted.layout)
            kind = "values" if name in OF_VALUES else "planted"
            yield Case(kind, planted.title, recipe, planted.plant, is_fault=True)


def _load(path: object, layout: str) -> Recipe:
    return load(str(path), split_overrides(layout), check_files=False).recipe
