"""Which layouts each fault harms, and what must be said of it: read by the tests and by ``tools/mutate``."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from tools.prove.faults import convert as c
from tools.prove.faults import data as d
from tools.prove.faults import exchanges as x
from tools.prove.faults import model as m
from tools.prove.faults import pipeline as p
from tools.prove.faults import resume as r
from tools.prove.faults import values as v

Check = Literal["verify", "model", "weights", "training", "conversion"]


class Fault(NamedTuple):
    """A fault, and what must find it: ``verify`` of a ``layout``, or another ``check`` (``checks.py``).

    ``says`` is searched, as a regular expression, in the words of the verdict, or in what the check has found.
    """

    plant: Callable[[], None]
    layout: str
    says: str = r" is off by .* on rank"
    check: Check = "verify"

    @property
    def title(self) -> str:
        where = self.layout if self.check == "verify" else self.check
        return f"{self.plant.__name__} ({where or 'one process'})"


def _checked(check: Check, says: str, *plants: Callable[[], None]) -> list[Fault]:
    return [Fault(plant, "", says, check) for plant in plants]


_WHOLE = (
    "mesh.tp=2 parallel.sequence_parallel=false"  # tp with a residual stream that all ranks hold
)
_SHARED = "mesh.tp=2 model.n_kv_heads=1"
_V = "mesh.pp=2 parallel.schedule=ZBVZeroBubble"
_TIED = "mesh.pp=2 model.tied=true"
_PACKED = "data.packing=documents"

FAULTS = [
    # tp
    Fault(x.repeat_own_shard_of_the_sequence, "mesh.tp=2"),
    Fault(x.gather_the_sequence_backwards, "mesh.tp=2"),
    Fault(x.keep_own_part_of_the_sum, "mesh.tp=2"),
    Fault(x.reduce_scatter_twice, "mesh.tp=2"),
    Fault(x.drop_sum_of_gradients, _WHOLE),
    Fault(x.sum_gradients_twice, _WHOLE),
    Fault(x.drop_sum_of_outputs, _WHOLE),
    Fault(x.reduce_over_the_wrong_group, f"{_WHOLE} mesh.dp_shard=2"),
    Fault(x.drop_reduction_of_norms, "mesh.tp=2", r"gradient of .*norm.* are off: .*norm\.weight$"),
    Fault(
        x.drop_reduction_of_norms,
        f"{_WHOLE} model.qk_norm=true",
        r"are off: blocks\.\*\.attn\.k_norm",
    ),
    Fault(x.leave_gradients_partial, "mesh.tp=2", "finish_gradients reduces every gradient"),
    Fault(x.read_the_wrong_kv_head, "mesh.tp=4 model.n_kv_heads=2"),
    Fault(
        x.keep_own_share_of_kv_gradients, _SHARED, r"attn\.wk\.weight, blocks\.\*\.attn\.wv\.weight"
    ),
    Fault(
        x.count_kv_gradients_on_every_rank,
        _SHARED,
        r"2 times the reference, suspect tp; .*attn\.wk\.weight",
    ),
    Fault(x.mask_the_vocabulary_one_off, "mesh.tp=2"),
    Fault(x.begin_rows_one_late, "mesh.tp=2", "only 126 of|is off by"),
    Fault(x.keep_own_maximum_of_logits, "mesh.tp=2"),
    Fault(x.keep_own_sum_of_exponentials, "mesh.tp=2"),
    # dp_shard, dp_replicate
    Fault(x.drop_reduce_scatter, "mesh.dp_shard=2"),
    Fault(x.drop_reduce_scatter, "mesh.cp=2"),
    Fault(x.drop_reduce_scatter, "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2"),
    Fault(
        x.reduce_shards_twice,
        "mesh.dp_shard=2",
        "it is 2 times the reference, suspect dp_shard; all",
    ),
    Fault(
        x.reduce_shards_twice,
        "mesh.dp_shard=2 mesh.cp=2",
        "it is 4 times the reference, suspect dp_shard x cp or mi",
    ),
    Fault(x.gather_the_first_parameters_for_ever, "mesh.dp_shard=2", "at step 2"),
    Fault(
        x.cut_rows_twice,
        "mesh.tp=2 mesh.dp_shard=3 model.vocab=259 model.dim=96 data.global_batch=12",
        r"embed.*holds \[43, \d+\] at \[217, 0\] of \[259, \d+\] on rank 5",
    ),
    Fault(x.keep_parameters_after_validation, "mesh.dp_shard=2 parallel.zero=1"),
    Fault(x.drop_all_reduce_of_replicas, "mesh.dp_replicate=2 mesh.dp_shard=2"),
    Fault(x.drop_all_reduce_of_replicas, "mesh.dp_replicate=2 parallel.zero=0"),
    Fault(
        x.all_reduce_replicas_twice,
        "mesh.dp_replicate=2",
        "2 times the reference, suspect dp_replicate; all",
    ),
    Fault(x.reduce_only_the_last_micro_batch, "mesh.dp_shard=2 parallel.zero=2"),
    Fault(x.reduce_what_was_reduced, "mesh.dp_shard=2 parallel.zero=1"),
    Fault(x.untie_the_head, "mesh.tp=2 model.tied=true", "embed|head"),
    # cp
    Fault(x.attend_to_own_tokens, "mesh.cp=2"),
    Fault(x.cut_the_sequence_contiguously, "mesh.cp=2"),
    Fault(x.lose_what_other_ranks_owe_the_keys, "mesh.cp=4"),
    Fault(x.lose_the_hop_of_keys, "mesh.cp=2"),
    Fault(x.lose_the_hop_of_keys_in_backward, "mesh.cp=2"),
    Fault(x.lose_the_hop_of_key_gradients, "mesh.cp=2"),
    Fault(x.use_one_buffer_for_the_ring, "mesh.cp=3 data.seq_len=252"),
    Fault(x.use_one_buffer_for_the_ring, "mesh.dp_shard=8 mesh.cp=4 data.global_batch=16"),
    Fault(x.hide_half_of_the_later_keys, "mesh.cp=2"),
    Fault(x.forget_documents_in_the_ring, f"mesh.cp=2 {_PACKED}"),
    Fault(x.let_documents_start_one_token_late, f"mesh.cp=2 {_PACKED}"),
    Fault(x.forget_that_a_query_sees_nothing, "mesh.cp=2 model.window=16"),
    Fault(
        x.lose_what_other_ranks_owe_the_keys,
        "mesh.cp=2 parallel.cp_method=allgather parallel.cp_balance=contiguous",
    ),
    Fault(x.join_the_parts_as_if_cut_in_order, "mesh.cp=2 parallel.cp_method=allgather"),
    Fault(x.exchange_the_wrong_heads, "mesh.cp=2 parallel.cp_method=ulysses"),
    Fault(v.count_positions_from_the_start_of_the_part, "mesh.cp=2"),
    Fault(v.label_before_the_cut_is_lost, "mesh.cp=2"),
    # pp
    Fault(p.lose_a_gradient_between_stages, "mesh.pp=2", "only on rank 0 with pp0"),
    Fault(
        p.double_the_gradients_between_stages,
        "mesh.pp=2",
        "2 times the reference, suspect pp; only on rank 0 with pp0",
    ),
    Fault(p.receive_the_activations_of_another_micro_batch, "mesh.pp=2"),
    Fault(p.take_the_labels_of_the_next_micro_batch, "mesh.pp=2"),
    Fault(p.swap_the_middle_stages, "mesh.pp=2 parallel.schedule=Interleaved1F1B model.n_layers=4"),
    Fault(p.evaluate_one_micro_batch_less, "mesh.pp=2", "^validation loss is off"),
    Fault(p.lose_a_put_off_gradient, _V, r"all but blocks\.\*\.attn_norm"),
    Fault(p.run_a_put_off_gradient_twice, _V, r"all but blocks\.\*\.attn_norm"),
    Fault(p.put_off_with_the_input_of_another_micro_batch, _V, r"all but blocks\.\*\.attn_norm"),
    Fault(p.lose_the_gradient_of_the_follower, _TIED, r"1 of \d+ are off: first\.embed\.weight"),
    Fault(p.leave_the_follower_behind, _TIED, "at step 2"),
    Fault(p.train_the_follower, _TIED, r"last\.head\.weight at step 1 is missing on rank 1"),
    # batch and loss
    Fault(
        v.double_the_divisor, "mesh.dp_shard=2", "0.5 times the reference, suspect dp_shard; all"
    ),
    Fault(
        v.double_the_divisor,
        "mesh.dp_replicate=2 mesh.dp_shard=2",
        "suspect dp_replicate x dp_shard",
    ),
    Fault(
        v.divide_by_micro_batches,
        "mesh.dp_shard=2",
        "0.25 times the reference, suspect micro-batches; all",
    ),
    Fault(v.divide_by_own_tokens, "mesh.dp_shard=2"),
    Fault(v.count_ignored_labels, "mesh.dp_shard=2", "times the reference"),
    Fault(v.count_tokens_on_every_tp_rank, "mesh.tp=2", "0.5 times the reference, suspect tp; all"),
    Fault(v.learn_ignored_labels, "mesh.dp_shard=2"),
    Fault(v.take_the_labels_of_the_next_row, "mesh.dp_shard=2"),
    Fault(v.restart_positions_one_late, f"mesh.tp=2 {_PACKED}"),
    Fault(v.take_the_documents_of_the_next_row, f"mesh.pp=2 {_PACKED}"),
    Fault(v.shift_positions, "mesh.pp=2", "blocks|first"),
    Fault(v.train_on_the_same_rows, "mesh.dp_shard=2"),
    Fault(v.forget_a_micro_batch, "mesh.tp=2"),
    Fault(v.keep_the_gradients_of_the_last_step, "mesh.dp_shard=2", "at step 2"),
    Fault(v.leave_out_a_chunk_of_the_loss, "memory.loss_chunks=2"),
    # attention, checkpointing
    Fault(v.forget_documents, f"mesh.tp=2 {_PACKED}"),
    Fault(v.hide_the_token_itself, "mesh.tp=2"),
    Fault(v.look_behind_the_window, "mesh.dp_shard=2 model.window=100"),
    Fault(v.deal_out_kv_heads_in_turn, "mesh.dp_shard=2"),
    Fault(v.recompute_with_other_positions, "memory.activation_checkpoint=full", "blocks|first"),
    Fault(v.recompute_with_another_input, "memory.activation_checkpoint=full", "blocks|first"),
    # norm, optimizer, first weights
    Fault(v.count_replicas_in_the_norm, "mesh.tp=2", "^gradient norm at step 1 is off"),
    Fault(v.norm_of_the_first_rank, "mesh.dp_shard=2", "^gradient norm|^weight"),
    Fault(v.clip_by_own_norm, "mesh.dp_shard=2", "^gradient norm after clipping"),
    Fault(v.clip_by_own_norm, "mesh.pp=2", "^gradient norm after clipping"),
    Fault(v.clip_twice, "mesh.dp_shard=2", "^gradient norm after clipping"),
    Fault(v.do_not_clip, "mesh.dp_shard=2", "^gradient norm after clipping"),
    Fault(v.decay_norms, "mesh.dp_shard=2", "^weight of .*norm"),
    Fault(v.step_all_but_one_parameter, "mesh.tp=2", r"1 of \d+ are off: last\.head\.weight"),
    Fault(v.step_on_one_rank_only, "mesh.dp_shard=2", "^weight.*only on rank 1 with dp_shard1"),
    Fault(v.forget_the_first_moment, "mesh.dp_shard=2", "^weight .*step 2"),
    Fault(v.swap_the_first_moments, "mesh.dp_shard=2", "^weight .*step 2"),
    Fault(v.keep_the_first_learning_rate, "mesh.dp_shard=2", "^weight"),
    Fault(v.set_the_learning_rate_of_one_group, "mesh.dp_shard=2", "^weight of .*norm"),
    Fault(v.same_weights_on_every_shard, "mesh.dp_shard=2"),
    Fault(v.start_from_other_weights_on_every_rank, "mesh.tp=2"),
    Fault(v.round_gradients, "mesh.dp_shard=2", "^gradient"),
    # loader
    Fault(d.give_positions_from_the_start_of_the_part, "mesh.cp=2"),
    Fault(d.give_positions_from_the_start_of_the_part, "mesh.cp=4 parallel.cp_balance=contiguous"),
    Fault(d.give_positions_from_the_start_of_the_part, f"mesh.cp=2 {_PACKED}"),
    Fault(d.give_positions_of_a_contiguous_part, "mesh.cp=2"),
    Fault(d.load_the_tokens_of_the_other_order, "mesh.cp=2"),
    Fault(d.load_the_tokens_of_the_other_order, "mesh.cp=2 parallel.cp_balance=contiguous"),
    Fault(d.read_the_rows_of_the_first_rank, "mesh.dp_shard=2"),
    Fault(d.label_a_token_with_itself, "mesh.tp=2"),
    Fault(d.label_a_token_with_the_next_but_one, "mesh.dp_shard=2"),
    Fault(d.label_the_last_token_with_the_first, "mesh.tp=2"),
    Fault(d.leave_out_a_token_between_samples, "mesh.dp_shard=2"),
    Fault(d.take_the_sample_after, "mesh.dp_shard=2"),
    Fault(d.take_samples_in_the_order_of_the_text, "mesh.dp_shard=2"),
    Fault(d.forget_the_seed_of_the_order, "mesh.dp_shard=2"),
    Fault(d.begin_documents_with_the_end_of_the_last, f"mesh.dp_shard=2 {_PACKED}"),
    Fault(d.learn_what_follows_a_document, f"mesh.tp=2 {_PACKED}"),
    # validation
    Fault(d.repeat_the_first_order, "mesh.dp_shard=2", "^validation loss is off"),
    Fault(d.hand_out_a_batch_twice, "mesh.dp_shard=2", "^validation loss is off"),
    Fault(d.validate_by_a_mean_of_batches, f"mesh.dp_shard=2 {_PACKED}", "^validation loss is off"),
    Fault(d.validate_by_a_mean_of_ranks, f"mesh.dp_shard=2 {_PACKED}", "^validation loss is off"),
    Fault(d.validate_on_rows_that_follow_the_seed, "mesh.dp_shard=2", "^validation loss is off"),
    Fault(d.validate_on_a_batch_less, "mesh.tp=2", "^validation loss is off"),
    Fault(d.validate_on_a_batch_more, "mesh.tp=2", "^validation loss is off"),
    Fault(d.validate_on_the_training_batch, "mesh.tp=2", "^validation loss is off"),
    # learning rate, clipping, AdamW
    Fault(d.take_the_learning_rate_of_the_next_step, "mesh.tp=2", "^weight"),
    Fault(
        d.take_the_learning_rate_of_the_last_step,
        "mesh.dp_shard=2 optim.warmup=10",
        "^weight .*step 2",
    ),
    Fault(d.forget_the_warmup, "mesh.tp=2 optim.warmup=10", "^weight"),
    Fault(d.warm_up_from_nothing, "mesh.tp=2 optim.warmup=10", "^weight"),
    Fault(d.decay_to_nothing, "mesh.tp=2", "^weight"),
    Fault(d.decay_to_the_end_of_the_run, "mesh.tp=2 optim.decay=50", "^weight"),
    Fault(d.decay_in_a_line, "mesh.tp=2", "^weight"),
    Fault(
        d.decay_in_a_line, "mesh.tp=2 optim.warmup=20", "^learning rate of step .* of the whole run"
    ),
    Fault(d.rise_again_after_the_decay, "mesh.tp=2 optim.decay=50", "^learning rate of step"),
    Fault(d.clip_with_a_small_constant, "mesh.dp_shard=2", "^gradient norm after clipping"),
    Fault(d.scale_small_gradients_up, "mesh.dp_shard=2", "^gradient norm after clipping at step 2"),
    Fault(d.clip_each_tensor_by_its_own_norm, "mesh.dp_shard=2", "^gradient norm after clipping"),
    Fault(d.swap_the_betas, "mesh.dp_shard=2", "^weight"),
    Fault(d.take_another_epsilon, "mesh.dp_shard=2", "^weight"),
    Fault(d.decay_through_the_gradient, "mesh.dp_shard=2", "^weight"),
    # rotation, first weights
    *_checked(
        "model",
        "^logits of the plain model",
        m.turn_by_another_base,
        m.round_angles,
        m.turn_neighbours,
        m.turn_halves_apart,
        m.turn_the_other_way,
    ),
    *_checked(
        "model",
        "^logits of the stretched model",
        m.forget_the_stretch_of_positions,
        m.swap_the_bounds_of_the_stretch,
        m.stretch_by_the_context_of_another_model,
    ),
    *_checked("model", "^logits of the with norms model", m.norm_after_the_rotation),
    *_checked(
        "weights",
        r"first weights of blocks\.0\.attn\.wq",
        m.start_every_block_alike,
        m.draw_weights_from_a_box,
    ),
    *_checked("weights", "with seed 7", m.start_every_run_alike),
    *_checked("weights", r"first weights of blocks\.0\.ffn\.w2", m.start_projections_too_wide),
    *_checked("weights", r"first weights of last\.norm", m.start_norms_at_zero),
    # resume
    *_checked(
        "training",
        "^(loss|grad_norm) of step [56] is",
        r.swap_two_moments,
        r.forget_the_second_moments,
        r.forget_the_first_moments,
        r.forget_how_many_steps_were_taken,
    ),
    *_checked(
        "training",
        "^(loss|grad_norm) of step 4 is",
        r.keep_the_first_weights,
        r.round_what_is_loaded,
        r.go_on_a_step_later,
        r.go_on_a_step_earlier,
        r.begin_the_data_anew,
    ),
    *_checked("training", "lr of step 4 is", r.begin_the_learning_rate_anew),
    *_checked("training", "lr of step 1 is", d.take_the_learning_rate_of_the_next_step),
    # conversion
    *_checked(
        "conversion",
        "^torch: blocks",
        c.swap_keys_and_values,
        c.swap_gate_and_up,
        c.count_blocks_from_the_end,
    ),
    *_checked("conversion", "^torch: blocks.0.attn_norm", c.swap_the_norms_of_a_block),
    *_checked("conversion", "^torch: first.embed", c.swap_embedding_and_head),
    *_checked(
        "conversion",
        "^meta: layers.0.attention.wk",
        c.leave_rotary_pairs_apart,
        c.turn_rotary_pairs_back,
    ),
    *_checked("conversion", "^meta: layers.0.attention.wk", c.rearrange_only_queries),
    *_checked("conversion", "^torch: ", c.round_to_half),
    *_checked(
        "conversion", "^convert refuses its own work", c.write_another_base, c.write_another_epsilon
    ),
]
