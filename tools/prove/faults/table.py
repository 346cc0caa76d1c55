"""The layouts that each fault harms, and what the proof must say about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tools.prove.faults import (
    convert,
    data,
    exchanges,
    experts,
    float8,
    machines,
    model,
    muon,
    narrow,
    pipeline,
    resume,
    values,
    windows,
)
from tools.prove.paths import MOE_RECIPE, RECIPE

Check = Literal[
    *("verify", "dtypes", "model", "weights", "training", "rollback", "conversion"),
    *("corruption", "stragglers"),
]


class Fault(NamedTuple):
    """A fault and the check that must find it.

    Attributes:
        plant: plants the fault in this process. Its docstring describes the fault.
        layout: overrides of the recipe, for ``verify`` and ``dtypes``.
        message: a regular expression that the error of the verdict, or the finding of another
            check, must match.
        check: ``verify`` of the layout, ``dtypes`` (the ledger of its dtypes), or one of
            ``checks.py``.
        recipe: the recipe that ``layout`` overrides.
    """

    plant: Callable[[], None]
    layout: str
    message: str = r" is off by .* on rank"
    check: Check = "verify"
    recipe: Path = RECIPE

    @property
    def title(self) -> str:
        """The name of the fault, with the layout or check that must find it."""
        where = self.layout if self.check in ("verify", "dtypes") else self.check
        return f"{self.plant.__name__} ({where or 'one process'})"


def _checked(check: Check, message: str, *plants: Callable[[], None]) -> list[Fault]:
    """Faults that one check must find with the same message."""
    return [Fault(plant, "", message, check) for plant in plants]


def _corrupted(what: str, plant: Callable[[], None]) -> Fault:
    """A fault of rank 1's machine, which the first comparison after step 7 must find."""
    return Fault(plant, "", rf"^step 10: corruption: {what} on rank 1 \(", "corruption")


def _moe(plant: Callable[[], None], layout: str, message: str = r" is off by .*") -> Fault:
    """A fault of a model with experts."""
    return Fault(plant, layout, message, recipe=MOE_RECIPE)


def _narrow(plant: Callable[[], None], layout: str, message: str, recipe: Path = RECIPE) -> Fault:
    """A narrow sum that the ledger of dtypes must find in bfloat16."""
    return Fault(plant, f"precision.compute=bfloat16 {layout}".strip(), message, "dtypes", recipe)


def _muon(layout: str, *plants: Callable[[], None], recipe: Path = RECIPE) -> list[Fault]:
    """Faults of Muon that change the weights of a layout."""
    layout = f"optim.name=muon {layout}".strip()
    return [Fault(plant, layout, r" (is|are) off", recipe=recipe) for plant in plants]


# Final: a second use of a name would change the layouts of the faults above it unnoticed.

# The experts of a layer on two ranks.
_EP: Final = "mesh.dp_shard=2 mesh.ep=2"
_SIGMOID: Final = f"{_EP} model.router=sigmoid model.router_bias=true"
_GROUPS: Final = f"{_SIGMOID} model.expert_groups=4 model.groups_per_token=2 model.router_scale=2.5"

# tp with a residual stream that is whole on all ranks.
_NO_SP: Final = "mesh.tp=2 parallel.sequence_parallel=false"
_SHARED: Final = "mesh.tp=2 model.n_kv_heads=1"
_OLMO_2: Final = "model.architecture=olmo2 model.preset=debug-olmo2"
_V: Final = "mesh.pp=2 parallel.schedule=ZBVZeroBubble"
_TIED: Final = "mesh.pp=2 model.tied=true"
_UNITS: Final = "parallel.fsdp_blocks=2 model.n_layers=5"
_NARROW: Final = "precision.reduce=bfloat16"
_PACKED: Final = "data.packing=documents"
_WHOLE_DOCUMENTS: Final = "data.packing=whole_documents"
_FLOAT8: Final = "precision.compute=bfloat16 precision.matmul=float8"
# All gradients that train are zero but for rounding.
_NOTHING: Final = 'model.window=1 optim.train=["blocks.*.attn.wq.weight"]'
# AdamW divides by the gradient itself.
_NO_MEMORY: Final = "optim.betas=[0.9,0.0] optim.lr=1e-2 optim.eps=1e-30"
# A parameter of blocks.0 that is a query's projection is in both.
_TWO_GROUPS: Final = (
    'optim.groups=[{train=["blocks.0.*"],lr_factor=0.5},'
    '{train=["*norm.weight","blocks.*.wq.weight"],lr_factor=2.0,weight_decay=0.5}]'
)

# What the proof says of several faults.
_VALIDATION: Final = "^validation loss is off"
_CLIPPED: Final = "^gradient norm after clipping"
_ALL_BUT_NORMS: Final = r"all but blocks\.\*\.attn_norm"

FAULTS = [
    # tp
    Fault(exchanges.repeat_own_shard_of_the_sequence, "mesh.tp=2"),
    Fault(exchanges.gather_the_sequence_backwards, "mesh.tp=2"),
    Fault(exchanges.keep_own_part_of_the_sum, "mesh.tp=2"),
    Fault(exchanges.reduce_scatter_twice, "mesh.tp=2"),
    Fault(exchanges.drop_sum_of_gradients, _NO_SP),
    Fault(exchanges.sum_gradients_twice, _NO_SP),
    Fault(exchanges.drop_sum_of_outputs, _NO_SP),
    Fault(exchanges.reduce_over_the_wrong_group, f"{_NO_SP} mesh.dp_shard=2"),
    Fault(
        exchanges.drop_reduction_of_norms,
        "mesh.tp=2",
        r"gradient of .*norm.* are off: .*norm\.weight$",
    ),
    Fault(
        exchanges.drop_reduction_of_norms,
        f"{_NO_SP} model.qk_norm=true",
        r"are off: blocks\.\*\.attn\.k_norm",
    ),
    Fault(exchanges.take_own_mean_in_wide_norms, f"mesh.tp=2 {_OLMO_2}"),
    Fault(exchanges.keep_own_gradient_of_means, f"mesh.tp=2 {_OLMO_2}"),
    Fault(exchanges.leave_out_a_norm, "mesh.tp=2", r"gradient of .*norm.* are off|is off"),
    Fault(exchanges.leave_out_a_norm, "mesh.tp=2 mesh.dp_shard=2 parallel.zero=3"),
    Fault(exchanges.sum_a_norm_twice, "mesh.tp=2"),
    Fault(exchanges.read_the_wrong_kv_head, "mesh.tp=4 model.n_kv_heads=2"),
    Fault(
        exchanges.keep_own_share_of_kv_gradients,
        _SHARED,
        r"attn\.wk\.weight, blocks\.\*\.attn\.wv\.weight",
    ),
    Fault(
        exchanges.count_kv_gradients_on_every_rank,
        _SHARED,
        r"2 times the reference, suspect tp; .*attn\.wk\.weight",
    ),
    Fault(exchanges.mask_the_vocabulary_one_off, "mesh.tp=2"),
    Fault(exchanges.begin_rows_one_late, "mesh.tp=2", "only 126 of|is off by"),
    Fault(exchanges.keep_own_maximum_of_logits, "mesh.tp=2"),
    Fault(exchanges.keep_own_sum_of_exponentials, "mesh.tp=2"),
    # dp_shard, dp_replicate
    Fault(exchanges.drop_reduce_scatter, "mesh.dp_shard=2"),
    Fault(exchanges.drop_reduce_scatter, "mesh.cp=2"),
    Fault(exchanges.drop_reduce_scatter, "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2"),
    Fault(
        exchanges.reduce_shards_twice,
        "mesh.dp_shard=2",
        "it is 2 times the reference, suspect dp_shard; all",
    ),
    Fault(
        exchanges.reduce_shards_twice,
        "mesh.dp_shard=2 mesh.cp=2",
        "it is 4 times the reference, suspect dp_shard x cp or mi",
    ),
    Fault(exchanges.send_gradients_in_bfloat16, "mesh.dp_shard=2"),
    Fault(
        exchanges.send_gradients_wide,
        f"mesh.dp_shard=2 {_NARROW}",
        "sent in a wider dtype than bfloat16",
    ),
    Fault(exchanges.sum_micro_batches_in_bfloat16, f"mesh.dp_shard=2 parallel.zero=1 {_NARROW}"),
    Fault(
        exchanges.sum_shards_in_bfloat16,
        f"mesh.dp_shard=4 {_NARROW}",
        r"in bfloat16 differs from the exact one by [1-9]\S* times what",
    ),
    Fault(exchanges.gather_the_first_parameters_for_ever, "mesh.dp_shard=2", "at step 2"),
    Fault(
        exchanges.cut_rows_twice,
        "mesh.tp=2 mesh.dp_shard=3 model.vocab=259 model.dim=96 data.global_batch=12",
        r"embed.*holds \[43, \d+\] at \[217, 0\] of \[259, \d+\] on rank 5",
    ),
    Fault(exchanges.drop_all_reduce_of_replicas, "mesh.dp_replicate=2 mesh.dp_shard=2"),
    Fault(exchanges.drop_all_reduce_of_replicas, "mesh.dp_replicate=2 parallel.zero=0"),
    Fault(
        exchanges.all_reduce_replicas_twice,
        "mesh.dp_replicate=2",
        "2 times the reference, suspect dp_replicate; all",
    ),
    Fault(exchanges.reduce_only_the_last_micro_batch, "mesh.dp_shard=2 parallel.zero=2"),
    Fault(exchanges.reduce_what_was_reduced, "mesh.dp_shard=2 parallel.zero=1"),
    Fault(
        exchanges.lose_units_of_several_blocks,
        f"mesh.dp_shard=2 {_UNITS}",
        r"gradient of blocks\.0\..*0\.5 times the reference, suspect dp_shard",
    ),
    Fault(
        exchanges.reduce_only_the_first_block_of_a_unit,
        f"mesh.dp_shard=2 {_UNITS}",
        r"gradient of blocks\.1\..* is missing on rank",
    ),
    Fault(exchanges.untie_the_head, "mesh.tp=2 model.tied=true", "embed|head"),
    # cp
    Fault(exchanges.attend_to_own_tokens, "mesh.cp=2"),
    Fault(exchanges.cut_the_sequence_contiguously, "mesh.cp=2"),
    Fault(exchanges.lose_what_other_ranks_owe_the_keys, "mesh.cp=4"),
    Fault(exchanges.lose_the_hop_of_keys, "mesh.cp=2"),
    Fault(exchanges.lose_the_hop_of_keys_in_backward, "mesh.cp=2"),
    Fault(exchanges.lose_the_hop_of_key_gradients, "mesh.cp=2"),
    Fault(exchanges.use_one_buffer_for_the_ring, "mesh.cp=3 data.seq_len=252"),
    Fault(exchanges.use_one_buffer_for_the_ring, "mesh.dp_shard=8 mesh.cp=4 data.global_batch=16"),
    Fault(exchanges.hide_half_of_the_later_keys, "mesh.cp=2"),
    Fault(exchanges.forget_documents_in_the_ring, f"mesh.cp=2 {_PACKED}"),
    Fault(exchanges.let_documents_start_one_token_late, f"mesh.cp=2 {_PACKED}"),
    Fault(exchanges.forget_that_a_query_sees_nothing, "mesh.cp=2 model.window=16"),
    Fault(
        exchanges.lose_what_other_ranks_owe_the_keys,
        "mesh.cp=2 parallel.cp_method=allgather parallel.cp_balance=contiguous",
    ),
    Fault(exchanges.join_the_parts_as_if_cut_in_order, "mesh.cp=2 parallel.cp_method=allgather"),
    Fault(exchanges.exchange_the_wrong_heads, "mesh.cp=2 parallel.cp_method=ulysses"),
    Fault(values.count_positions_from_the_start_of_the_part, "mesh.cp=2"),
    Fault(values.label_before_the_cut_is_lost, "mesh.cp=2"),
    # documents and windows on the path of GPUs
    Fault(windows.see_one_key_too_many, "mesh.dp_shard=2 model.window=16"),
    Fault(windows.see_one_key_too_many, f"mesh.cp=2 model.window=16 {_PACKED}"),
    Fault(windows.lose_the_first_key, "mesh.cp=2 model.window=16"),
    Fault(windows.let_windows_end_with_the_last_edge, "mesh.cp=2 model.window=16"),
    Fault(windows.let_documents_begin_one_late, f"mesh.cp=2 {_PACKED}"),
    # pp
    Fault(pipeline.lose_a_gradient_between_stages, "mesh.pp=2", "only on rank 0 with pp0"),
    Fault(
        pipeline.double_the_gradients_between_stages,
        "mesh.pp=2",
        "2 times the reference, suspect pp; only on rank 0 with pp0",
    ),
    Fault(pipeline.receive_the_activations_of_another_micro_batch, "mesh.pp=2"),
    Fault(pipeline.take_the_labels_of_the_next_micro_batch, "mesh.pp=2"),
    Fault(
        pipeline.swap_the_middle_stages,
        "mesh.pp=2 parallel.schedule=Interleaved1F1B model.n_layers=4",
    ),
    Fault(pipeline.evaluate_one_micro_batch_less, "mesh.pp=2", _VALIDATION),
    Fault(pipeline.lose_a_deferred_gradient, _V, _ALL_BUT_NORMS),
    Fault(pipeline.run_a_deferred_gradient_twice, _V, _ALL_BUT_NORMS),
    Fault(pipeline.defer_with_the_input_of_another_micro_batch, _V, _ALL_BUT_NORMS),
    Fault(
        pipeline.lose_the_gradient_of_the_tied_copy,
        _TIED,
        r"1 of \d+ are off: first\.embed\.weight",
    ),
    Fault(pipeline.leave_the_tied_copy_behind, _TIED, "at step 2"),
    Fault(
        pipeline.train_the_tied_copy, _TIED, r"last\.head\.weight at step 1 is missing on rank 1"
    ),
    # batch and loss
    Fault(
        values.double_the_divisor,
        "mesh.dp_shard=2",
        "0.5 times the reference, suspect dp_shard; all",
    ),
    Fault(
        values.double_the_divisor,
        "mesh.dp_replicate=2 mesh.dp_shard=2",
        "suspect dp_replicate x dp_shard",
    ),
    Fault(
        values.divide_by_micro_batches,
        "mesh.dp_shard=2",
        "0.25 times the reference, suspect micro-batches; all",
    ),
    Fault(values.divide_by_own_tokens, "mesh.dp_shard=2"),
    Fault(values.count_ignored_labels, "mesh.dp_shard=2", "times the reference"),
    Fault(
        values.count_tokens_on_every_tp_rank,
        "mesh.tp=2",
        "0.5 times the reference, suspect tp; all",
    ),
    Fault(values.learn_ignored_labels, "mesh.dp_shard=2"),
    Fault(values.take_the_labels_of_the_next_row, "mesh.dp_shard=2"),
    Fault(values.restart_positions_one_late, f"mesh.tp=2 {_PACKED}"),
    Fault(values.take_the_documents_of_the_next_row, f"mesh.pp=2 {_PACKED}"),
    Fault(values.keep_the_documents_of_the_first_step, f"mesh.cp=2 {_PACKED}", "step 2"),
    Fault(values.shift_positions, "mesh.pp=2", "blocks|first"),
    Fault(values.train_on_the_same_rows, "mesh.dp_shard=2"),
    Fault(values.forget_a_micro_batch, "mesh.tp=2"),
    Fault(values.keep_the_gradients_of_the_last_step, "mesh.dp_shard=2", "at step 2"),
    Fault(values.leave_out_a_chunk_of_the_loss, "memory.loss_chunks=2"),
    Fault(values.forget_the_divisor_of_a_loss_in_chunks, "memory.loss_chunks=2"),
    Fault(values.divide_a_loss_in_chunks_twice, "mesh.tp=2 memory.loss_chunks=2"),
    # attention, checkpointing
    Fault(values.forget_documents, f"mesh.tp=2 {_PACKED}"),
    Fault(values.hide_the_token_itself, "mesh.tp=2"),
    Fault(values.look_behind_the_window, "mesh.dp_shard=2 model.window=100"),
    Fault(values.deal_out_kv_heads_in_turn, "mesh.dp_shard=2"),
    Fault(
        values.recompute_with_other_positions, "memory.activation_checkpoint=full", "blocks|first"
    ),
    Fault(values.recompute_with_another_input, "memory.activation_checkpoint=full", "blocks|first"),
    # float8
    Fault(float8.scale_columns, _FLOAT8, " is off by"),
    Fault(float8.take_the_scales_of_the_first_rank, f"mesh.tp=2 {_FLOAT8}", " is off by"),
    Fault(float8.forget_a_scale, _FLOAT8, " is off by"),
    Fault(float8.round_nothing_in_backward, f"mesh.dp_shard=2 {_FLOAT8}"),
    Fault(float8.round_the_weight_gradient, _FLOAT8, r" is off by"),
    Fault(float8.leave_a_layer_out, f"mesh.tp=2 {_FLOAT8}", " is off by"),
    Fault(
        float8.leave_experts_out,
        f"mesh.dp_shard=2 mesh.ep=2 {_FLOAT8}",
        " is off by",
        recipe=MOE_RECIPE,
    ),
    Fault(
        float8.round_the_weight_gradients_of_experts,
        f"mesh.dp_shard=2 {_FLOAT8}",
        " is off by",
        recipe=MOE_RECIPE,
    ),
    # gradient norm, optimizer, initial weights
    Fault(
        values.train_frozen_parameters,
        'mesh.dp_shard=2 optim.train=["blocks.1.*"]',
        r"first\.embed\.weight at step 1 is not in the reference",
    ),
    Fault(
        values.freeze_the_norms_too,
        'mesh.tp=2 optim.train=["blocks.1.*"]',
        r"attn_norm\.weight at step 1: ranks hold only 0 of",
    ),
    Fault(values.count_replicas_in_the_norm, "mesh.tp=2", "^gradient norm at step 1 is off"),
    Fault(values.norm_of_the_first_rank, "mesh.dp_shard=2", "^gradient norm|^weight"),
    Fault(values.clip_by_own_norm, "mesh.dp_shard=2", _CLIPPED),
    Fault(values.clip_by_own_norm, "mesh.pp=2", _CLIPPED),
    Fault(values.clip_twice, "mesh.dp_shard=2", _CLIPPED),
    Fault(values.do_not_clip, "mesh.dp_shard=2", _CLIPPED),
    Fault(values.decay_norms, "mesh.dp_shard=2", "^weight of .*norm"),
    *(
        Fault(fault, f"mesh.tp=2 {_TWO_GROUPS}{optimizer}", "^weight")
        for optimizer in ("", " optim.name=muon")
        for fault in (
            values.forget_the_factor_of_a_group,
            values.take_the_last_group_that_matches,
            values.forget_the_decay_of_a_group,
        )
    ),
    # The clipped norm comes first: the optimizer also clips.
    Fault(values.step_all_but_one_parameter, "mesh.tp=2", _CLIPPED),
    Fault(
        values.step_on_one_rank_only, "mesh.dp_shard=2", "^weight.*only on rank 1 with dp_shard1"
    ),
    Fault(values.forget_the_first_moment, "mesh.dp_shard=2", "^weight .*step 2"),
    Fault(values.swap_the_first_moments, "mesh.dp_shard=2", "^weight .*step 2"),
    Fault(values.keep_the_first_learning_rate, "mesh.dp_shard=2", "^weight"),
    Fault(values.set_the_learning_rate_of_one_group, "mesh.dp_shard=2", "^weight of .*norm"),
    Fault(values.same_weights_on_every_shard, "mesh.dp_shard=2"),
    Fault(values.start_from_other_weights_on_every_rank, "mesh.tp=2"),
    Fault(values.round_gradients, "mesh.dp_shard=2", "^gradient"),
    # gradients that are zero but for rounding, and an optimizer that makes much of little
    Fault(values.look_behind_the_window, f"mesh.dp_shard=2 {_NOTHING}", r"^gradient of .*wq"),
    Fault(values.learn_ignored_labels, f"mesh.tp=2 {_NOTHING}", "^loss"),
    Fault(values.take_the_labels_of_the_next_row, f"mesh.cp=2 {_NOTHING}", "^loss"),
    Fault(values.norm_of_the_first_rank, f"mesh.dp_shard=2 {_NO_MEMORY}", "^gradient norm"),
    Fault(values.round_gradients, f"mesh.dp_shard=2 {_NO_MEMORY}", "^gradient"),
    Fault(exchanges.drop_reduce_scatter, f"mesh.cp=2 {_NO_MEMORY}", "^gradient"),
    Fault(values.decay_norms, f"mesh.tp=2 {_NO_MEMORY}", "^weight of .*norm"),
    Fault(values.swap_the_first_moments, f"mesh.tp=2 {_NO_MEMORY}", "^weight .*step 2"),
    Fault(values.forget_the_first_moment, f"mesh.dp_shard=2 {_NO_MEMORY}", "^weight .*step 2"),
    Fault(data.take_another_epsilon, f"mesh.dp_shard=2 {_NO_MEMORY}", "^weight"),
    Fault(data.take_the_learning_rate_of_the_next_step, f"mesh.tp=2 {_NO_MEMORY}", "^weight"),
    # loader
    Fault(data.give_positions_from_the_start_of_the_part, "mesh.cp=2"),
    Fault(
        data.give_positions_from_the_start_of_the_part, "mesh.cp=4 parallel.cp_balance=contiguous"
    ),
    Fault(data.give_positions_from_the_start_of_the_part, f"mesh.cp=2 {_PACKED}"),
    Fault(data.give_positions_of_a_contiguous_part, "mesh.cp=2"),
    Fault(data.load_the_tokens_of_the_other_order, "mesh.cp=2"),
    Fault(data.load_the_tokens_of_the_other_order, "mesh.cp=2 parallel.cp_balance=contiguous"),
    Fault(data.read_the_rows_of_the_first_rank, "mesh.dp_shard=2"),
    Fault(data.label_a_token_with_itself, "mesh.tp=2"),
    Fault(data.label_a_token_with_the_next_but_one, "mesh.dp_shard=2"),
    Fault(data.label_the_last_token_with_the_first, "mesh.tp=2"),
    Fault(data.leave_out_a_token_between_samples, "mesh.dp_shard=2"),
    Fault(data.take_the_sample_after, "mesh.dp_shard=2"),
    Fault(data.take_samples_in_the_order_of_the_text, "mesh.dp_shard=2"),
    Fault(data.forget_the_seed_of_the_order, "mesh.dp_shard=2"),
    Fault(data.begin_documents_with_the_end_of_the_last, f"mesh.dp_shard=2 {_PACKED}"),
    Fault(data.learn_what_follows_a_document, f"mesh.tp=2 {_PACKED}"),
    Fault(data.cut_documents_in_samples_of_whole_ones, f"mesh.dp_shard=2 {_WHOLE_DOCUMENTS}"),
    Fault(data.learn_what_fills_samples_up, f"mesh.dp_shard=2 {_WHOLE_DOCUMENTS}"),
    # validation
    Fault(data.repeat_the_first_order, "mesh.dp_shard=2", _VALIDATION),
    Fault(data.hand_out_a_batch_twice, "mesh.dp_shard=2", _VALIDATION),
    Fault(data.validate_by_a_mean_of_batches, f"mesh.dp_shard=2 {_PACKED}", _VALIDATION),
    Fault(data.validate_by_a_mean_of_ranks, f"mesh.dp_shard=2 {_PACKED}", _VALIDATION),
    Fault(data.validate_on_rows_that_follow_the_seed, "mesh.dp_shard=2", _VALIDATION),
    Fault(data.validate_on_a_batch_less, "mesh.tp=2", _VALIDATION),
    Fault(data.validate_on_a_batch_more, "mesh.tp=2", _VALIDATION),
    Fault(data.validate_on_the_training_batch, "mesh.tp=2", _VALIDATION),
    # learning rate, clipping, AdamW
    Fault(data.take_the_learning_rate_of_the_next_step, "mesh.tp=2", "^weight"),
    Fault(
        data.take_the_learning_rate_of_the_last_step,
        "mesh.dp_shard=2 optim.warmup=10",
        "^weight .*step 2",
    ),
    Fault(data.forget_the_warmup, "mesh.tp=2 optim.warmup=10", "^weight"),
    Fault(data.warm_up_from_nothing, "mesh.tp=2 optim.warmup=10", "^weight"),
    Fault(data.decay_to_nothing, "mesh.tp=2", "^weight"),
    Fault(data.decay_to_the_end_of_the_run, "mesh.tp=2 optim.decay=50", "^weight"),
    Fault(data.decay_in_a_line, "mesh.tp=2", "^weight"),
    Fault(
        data.decay_in_a_line,
        "mesh.tp=2 optim.warmup=20",
        "^learning rate of step .* of the whole run",
    ),
    Fault(data.rise_again_after_the_decay, "mesh.tp=2 optim.decay=50", "^learning rate of step"),
    Fault(data.clip_with_a_small_constant, "mesh.dp_shard=2", _CLIPPED),
    Fault(
        data.scale_small_gradients_up, "mesh.dp_shard=2", "^gradient norm after clipping at step 2"
    ),
    Fault(data.clip_each_tensor_by_its_own_norm, "mesh.dp_shard=2", _CLIPPED),
    Fault(data.swap_the_betas, "mesh.dp_shard=2", "^weight"),
    Fault(data.take_another_epsilon, "mesh.dp_shard=2", "^weight"),
    Fault(data.decay_through_the_gradient, "mesh.dp_shard=2", "^weight"),
    # rotary positions, initial weights
    *_checked(
        "model",
        "^logits of the plain model",
        model.turn_by_another_base,
        model.round_angles,
        model.turn_neighbours,
        model.turn_halves_apart,
        model.turn_the_other_way,
    ),
    *_checked(
        "model",
        "^logits of the stretched model",
        model.forget_the_stretch_of_positions,
        model.swap_the_bounds_of_the_stretch,
        model.stretch_by_the_context_of_another_model,
    ),
    *_checked("model", "^logits of the with norms model", model.norm_after_the_rotation),
    *_checked(
        "model",
        r"^gradient of first\.embed\.weight of the with sigmoid experts model",
        experts.forget_to_divide_shares,
    ),
    *_checked(
        "weights",
        r"initial weights of blocks\.0\.attn\.wq",
        model.start_every_block_alike,
        model.draw_weights_from_a_box,
    ),
    *_checked("weights", "with seed 7", model.start_every_run_alike),
    *_checked(
        "weights", r"initial weights of blocks\.0\.ffn\.w2", model.start_projections_too_wide
    ),
    *_checked("weights", r"initial weights of last\.norm", model.start_norms_at_zero),
    # resume
    *_checked(
        "training",
        "^(loss|grad_norm) of step [56] is",
        resume.swap_two_moments,
        resume.forget_the_second_moments,
        resume.forget_the_first_moments,
        resume.forget_how_many_steps_were_taken,
    ),
    *_checked(
        "training",
        "^(loss|grad_norm) of step 4 is",
        resume.keep_the_first_weights,
        resume.round_what_is_loaded,
        resume.go_on_a_step_later,
        resume.go_on_a_step_earlier,
        resume.begin_the_data_anew,
    ),
    *_checked("training", "lr of step 4 is", resume.begin_the_learning_rate_anew),
    *_checked("training", "lr of step 1 is", data.take_the_learning_rate_of_the_next_step),
    *_checked(
        "training",
        r"^validation_loss of step \d is",
        data.validate_in_the_order_of_new_runs,
    ),
    *_checked(
        "rollback",
        r"^the run remembers \{'losses'",
        resume.keep_what_was_rolled_back,
        resume.count_the_bad_step_after_a_rollback,
    ),
    *_checked(
        "rollback", r"^the steps have the random seeds", resume.draw_the_same_numbers_in_every_step
    ),
    # experts
    _moe(
        experts.multiply_expert_gradients_by_ep,
        _EP,
        r"experts\..* 2 times the reference, suspect .*ep",
    ),
    _moe(experts.divide_expert_gradients_by_efsdp, "mesh.dp_shard=4 mesh.ep=2", r"experts\."),
    _moe(
        experts.reduce_experts_over_the_shards_only,
        "mesh.dp_replicate=2 mesh.dp_shard=2 mesh.ep=2",
        r"experts\.",
    ),
    _moe(experts.shard_experts_over_dense_ranks, "mesh.dp_shard=2 mesh.tp=2"),
    _moe(experts.drop_reduction_of_routers, "mesh.tp=2", r"router\.weight"),
    _moe(experts.norm_leaves_out_experts, "mesh.tp=2 mesh.ep=2", "gradient norm .* is off"),
    _moe(experts.norm_counts_experts_on_every_rank, _EP, "gradient norm .* is off"),
    _moe(
        experts.clip_by_the_norm_of_own_ep_group,
        "mesh.dp_shard=4 mesh.ep=2",
        "after clipping .* is off",
    ),
    _moe(experts.read_ranks_as_experts, _EP),
    _moe(experts.mix_up_the_splits, _EP),
    _moe(
        experts.mix_up_the_rows_of_a_layer_that_runs_again,
        f"{_EP} memory.activation_checkpoint=full",
        "different metadata",  # torch compares the shapes of what is computed again
    ),
    _moe(experts.return_tokens_in_another_order, _EP),
    _moe(experts.keep_gradients_of_sent_tokens, _EP, "is missing on rank"),
    _moe(experts.read_rows_that_nobody_wrote, _EP),
    _moe(experts.choose_by_another_rank, _EP, "."),
    _moe(experts.skip_experts_without_tokens, _EP, r"weight of .*experts\."),
    _moe(experts.detach_the_weights_of_experts, _EP),
    _moe(experts.forget_to_renormalise, _EP),
    _moe(experts.forget_the_scale, _GROUPS),
    _moe(experts.choose_other_groups, _GROUPS),
    _moe(experts.let_the_bias_into_the_weights, _SIGMOID),
    _moe(experts.swap_gate_and_up, _EP),
    _moe(experts.permute_the_experts, _EP),
    _moe(experts.leave_out_the_shared_expert, f"{_EP} model.shared_ffn=48"),
    _moe(experts.detach_the_losses, _EP),
    _moe(experts.scale_the_losses_by_ranks, _EP),
    _moe(experts.divide_losses_by_own_tokens, _EP),
    _moe(experts.lose_losses_of_early_stages, "mesh.pp=2"),
    _moe(experts.count_own_part_of_the_sequence, "mesh.cp=2"),
    _moe(experts.count_own_part_of_the_sequence, "mesh.tp=2"),
    _moe(experts.merge_documents_in_the_balance_loss, f"{_EP} data.packing=documents"),
    _moe(experts.shift_documents_over_tp, "mesh.tp=2 data.packing=documents"),
    _moe(experts.move_biases_by_own_counts, _SIGMOID, r"router\.bias"),
    _moe(experts.move_biases_twice, _SIGMOID, r"router\.bias"),
    _moe(experts.keep_biases_in_bfloat16, _SIGMOID, r"router\.bias"),
    _moe(experts.move_biases_the_other_way, _SIGMOID, r"router\.bias"),
    _moe(experts.count_validation_in_the_balance, _SIGMOID, r"router\.bias"),
    _moe(
        experts.count_recomputed_tokens,
        f"{_SIGMOID} memory.activation_checkpoint=full",
        r"router\.bias",
    ),
    _moe(experts.count_every_call, "memory.activation_checkpoint=full", "tokens of expert"),
    _moe(experts.forget_what_graphs_count, f"{_EP} compile.enabled=true", "tokens of expert"),
    _moe(
        experts.count_recomputed_graphs,
        "compile.enabled=true memory.activation_checkpoint=full",
        "tokens of expert",
    ),
    _moe(
        experts.share_the_first_documents_with_graphs,
        f"{_EP} compile.enabled=true data.packing=documents",
    ),
    _moe(experts.move_biases_by_own_counts, _EP, "tokens of expert"),
    _moe(experts.route_again_in_recomputation, f"{_EP} memory.activation_checkpoint=full", "."),
    # dtypes: what no proof in float64 can see
    _narrow(
        narrow.norm_in_the_dtype_of_gradients,
        "mesh.dp_shard=2",
        r"not in float64: .*compute_gradients: aten::pow\S* of float32 .*squared norm",
    ),
    _narrow(narrow.sum_the_loss_narrow, "", r"cross_entropy: aten::nll_loss_forward of bf"),
    _narrow(
        narrow.sum_the_loss_narrow,
        "memory.loss_chunks=2",
        r"_Parts\.gradients: aten::add_\.Tensor of bfloat16",
    ),
    _narrow(
        narrow.sum_exponentials_narrow, "mesh.tp=2", r"vocab\.py:.*: c10d::allreduce_ of bfloat16"
    ),
    _narrow(narrow.turn_by_narrow_angles, "", r"rope_table: aten::cos of bfloat16"),
    _narrow(narrow.route_narrow, "", r"Router\.forward: aten::_softmax of bfloat16", MOE_RECIPE),
    _narrow(
        narrow.sum_balance_losses_narrow,
        "",
        r"Router\._balance_loss: aten::sum of bfloat16",
        MOE_RECIPE,
    ),
    _narrow(
        narrow.add_experts_narrow, "", r"_WeightedSum\.forward: aten::addcmul_ of bf", MOE_RECIPE
    ),
    _narrow(
        narrow.count_tokens_of_experts_narrow,
        "",
        r"RouterStatistics\.add: aten::add\.Tensor of bfloat16",
        MOE_RECIPE,
    ),
    _narrow(
        narrow.add_losses_of_micro_batches_narrow,
        "",
        r"OneStage\.forward: aten::add_\.Tensor of bfloat16(?s:.)*OneStage\.forward_backward",
    ),
    _narrow(
        narrow.add_losses_of_micro_batches_narrow,
        "mesh.pp=2",
        r"runtime\.py:.*: aten::add.* of bfloat16",
    ),
    _narrow(
        narrow.add_gradients_over_tp_narrow,
        "mesh.tp=2",
        r"finish_gradients: c10d::allreduce_ of bfloat16",
    ),
    _narrow(narrow.merge_blocks_narrow, "mesh.cp=2", r"aten::lerp_\.Tensor of bfloat16"),
    _narrow(narrow.add_gradients_of_keys_narrow, "mesh.cp=2", r"ring\.py:.*: aten::add\.Ten"),
    _narrow(narrow.take_statistics_of_norms_narrow, "", r"aten::mean\.dim of bfloat16"),
    _narrow(narrow.update_narrow, "", r"optim:.*: aten::mul\.Tensor of bfloat16"),
    _narrow(
        exchanges.sum_micro_batches_in_bfloat16,
        f"mesh.dp_shard=2 parallel.zero=1 {_NARROW}",
        r"AccumulateGrad: aten::add_\.Tensor of bfloat16",
    ),
    _narrow(
        exchanges.sum_shards_in_bfloat16,
        f"mesh.dp_shard=4 {_NARROW}",
        r"SendNarrow\.__call__: aten::sum\.dim_IntList of bfloat16",
    ),
    # conversion
    *_checked(
        "conversion",
        "^torch: blocks",
        convert.swap_keys_and_values,
        convert.swap_gate_and_up,
        convert.count_blocks_from_the_end,
    ),
    *_checked("conversion", "^torch: blocks.0.attn_norm", convert.swap_the_norms_of_a_block),
    *_checked("conversion", "^torch: first.embed", convert.swap_embedding_and_head),
    *_checked(
        "conversion",
        "^meta: layers.0.attention.wk",
        convert.leave_rotary_pairs_apart,
        convert.turn_rotary_pairs_back,
    ),
    *_checked("conversion", "^meta: layers.0.attention.wk", convert.rearrange_only_queries),
    *_checked("conversion", "^torch: ", convert.round_to_half),
    *_checked(
        "conversion",
        "^convert refuses its own work",
        convert.write_another_base,
        convert.write_another_epsilon,
    ),
    *_muon(
        "mesh.dp_shard=2",
        muon.orthogonalise_shards,
        muon.place_parts_one_rank_further,
        muon.send_the_part_of_the_owner,
        muon.keep_the_momentum_of_another_shard,
    ),
    *_muon("mesh.tp=2", muon.orthogonalise_shards, muon.orthogonalise_the_head),
    *_muon("mesh.dp_replicate=2", muon.leave_out_a_replica),
    *_muon(_EP, muon.mix_the_experts, muon.give_experts_the_results_of_others, recipe=MOE_RECIPE),
    *_muon("optim.lr_scale=original", muon.swap_rows_and_columns),
    *_muon("optim.matrix_lr=1e-3", muon.ignore_the_rate_of_matrices),
    *_muon("mesh.dp_shard=2 optim.newton_schulz_steps=25", muon.orthogonalise_shards),
    *_muon("optim.newton_schulz=[3,-4,2] optim.newton_schulz_steps=99", muon.forget_the_momentum),
    *_muon(
        "",
        muon.stop_one_step_early,
        muon.swap_two_coefficients,
        muon.leave_out_the_factor,
        muon.forget_the_momentum,
        muon.decay_twice,
        muon.clip_no_matrix,
        muon.look_back,
        muon.orthogonalise_in_bfloat16,
    ),
    # machines: the first comparison after step 7 is that after step 10
    _corrupted("other parameters", machines.flip_a_bit_of_a_replica),
    *_checked(
        "corruption",
        r"step 10: corruption: another optimizer state on rank 1 \(",
        machines.flip_a_bit_of_a_moment,
    ),
    _corrupted(r"another gradient of blocks\.0, .*", machines.err_in_one_weight_gradient),
    _corrupted(r"another gradient of blocks\.1, .*", machines.err_in_the_gradient_of_an_activation),
    _corrupted("another loss of a micro-batch .*", machines.err_in_the_forward_of_a_layer),
    *_checked(
        "stragglers",
        r"(?m)^step (1\d|2[0-7]): straggler: rank 1 \(",
        machines.take_half_as_long_again,
    ),
]
