"""The words of other programs beside the keys of recipes.

The translators and docs/coming_from_elsewhere.md read the same tables, so that the page cannot
differ from the code: ``python -m tools.words_page`` writes its tables.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple


class Word(NamedTuple):
    """A word of another program.

    Attributes:
        name: the word: of Megatron-LM, an argument without dashes and with underscores; of the
            others, the keys of a file with dots between them. ``optimizer.*`` stands for all keys
            below ``optimizer``.
        ours: the key of a recipe, or several with commas between them. Empty: there is no equal.
        note: how the value is computed, or why there is no equal and what happens instead.
        is_copied: whether the value moves to the key as it is. Otherwise a translator computes it.
        values: for a value that is copied, our value of each of theirs, if they differ.
        fits: with no equal, the values with which nothing is lost. ``*`` means any.
        aliases: other names of the same word.
        decides: whether a word without an equal decides the layout, the model, the batch or the
            optimizer. A value that does not fit is then an open point of the recipe.
    """

    name: str
    ours: str = ""
    note: str = ""
    is_copied: bool = False
    values: Mapping[str, object] = {}
    fits: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    decides: bool = False


def _copied(
    name: str, ours: str, *aliases: str, note: str = "", values: Mapping[str, object] = {}
) -> Word:
    return Word(name, ours, note, is_copied=True, values=values, aliases=aliases)


def _computed(name: str, ours: str, note: str, *aliases: str) -> Word:
    return Word(name, ours, note, aliases=aliases)


def _without_equal(note: str, names: str, *, fits: tuple[str, ...] = ()) -> list[Word]:
    return [Word(name, note=note, fits=fits) for name in names.split()]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANY = ("*",)
_OFF = ("false", "0", "0.0", "none", "null", "", "[]")


def _open(note: str, names: str, *, fits: tuple[str, ...] = _OFF) -> list[Word]:
    return [Word(name, note=note, fits=fits, decides=True) for name in names.split()]


_KERNELS = "chooses kernels; they change the speed, and not what is computed"
_OVERLAP = "FSDP and the pipeline overlap by themselves what they can"
_LOGGING = "logs something; metrics.jsonl and TensorBoard have our own numbers"
_LAUNCHER = (
    "of the launcher: composer3d train starts a machine's ranks, and torchrun several machines"
)
_FILES = "files of another format: prepare the text with composer3d prepare, and set data.path"
_TOKENIZER = "the tokenizer belongs to composer3d prepare --tokenizer; it gives the vocabulary"
_INIT = "initial weights have our own rule, which does not depend on the layout"
_DROPOUT = "composer3d has no dropout: it is 0"
_LOSS_SCALE = "bfloat16 needs no loss scaling"
_LLAMA = "our models are Llamas, without this kind of layer"
_CUT = "the layers of stages are cut evenly by parameters; set parallel.stages"
_ALIKE = "the batch, the learning rate and the weight decay have one value for all that is trained"
_OTHER_JOB = "trains something else, or in another way, than the next token of a text"
_NO_ARITHMETIC = "composer3d computes in bfloat16, float32 and float8"
_OTHER_FILE = "names another file, which is not read: give what it says with --set"
_EXACT = "composer3d drops no token: every expert computes all that is routed to it"
_RESUME = "a run resumes from its own newest checkpoint; see checkpoint.resume"
_FOLDER = "a run's files are in run.out_dir/run.name"
_PROFILER = "set metrics.profile_steps and metrics.profile_ranks (docs/review.md)"

MEGATRON = [
    # The mesh.
    _computed(
        "tensor_model_parallel_size",
        "mesh.tp",
        "ranks that share each layer",
        "tensor_parallel_size",
        "tensor_parallel",
        "tp_size",
        "tp",
        "model_parallel_size",
    ),
    _computed(
        "pipeline_model_parallel_size",
        "mesh.pp",
        "pipeline ranks",
        "pipeline_parallel_size",
        "pipeline_parallel",
        "pp_size",
        "pp",
    ),
    _computed(
        "context_parallel_size",
        "mesh.cp",
        "ranks that share each sequence",
        "context_parallel",
        "cp_size",
        "cp",
    ),
    _computed(
        "expert_model_parallel_size",
        "mesh.ep",
        "ranks that share experts: here a part of dp_shard x cp x tp",
        "expert_parallel_size",
        "expert_parallel",
        "ep_size",
        "ep",
        "moe_expert_parallel_size",
    ),
    _computed(
        "data_parallel_size",
        "mesh.dp_shard, mesh.dp_replicate",
        "for a pasted dict; a script gives the number of GPUs",
        "data_parallel",
        "dp_size",
        "dp",
    ),
    _computed(
        "world_size",
        "mesh.dp_shard, mesh.dp_replicate",
        "the GPUs, over tp x pp x cp",
        "num_gpus",
        "total_gpus",
        "gpus",
        "n_gpus",
    ),
    _computed("nproc_per_node", "", "times nnodes: the number of GPUs", "gpus_per_node"),
    _computed("nnodes", "", "times nproc_per_node: the number of GPUs", "num_nodes"),
    _computed(
        "num_virtual_stages_per_pipeline_rank",
        "parallel.virtual_stages, parallel.schedule",
        "above 1: Interleaved1F1B",
        "virtual_pipeline_model_parallel_size",
        "virtual_pipeline_parallel_size",
        "virtual_stages",
        "num_virtual_stages",
    ),
    _computed(
        "num_layers_per_virtual_pipeline_stage",
        "parallel.virtual_stages, parallel.schedule",
        "layers / (pp x this) stages on each rank",
    ),
    _computed(
        "use_distributed_optimizer",
        "parallel.zero",
        "1: the optimizer is sharded. Without it 0, and dp_replicate ranks",
    ),
    _computed("zero_stage", "parallel.zero", "of Megatron-DeepSpeed, as zero_optimization.stage"),
    _computed(
        "data_parallel_sharding_strategy",
        "parallel.zero",
        "no_shard 0, optim 1, optim_grads 2, optim_grads_params 3",
    ),
    _computed(
        "use_megatron_fsdp", "parallel.zero", "3, or what the strategy says", "use_custom_fsdp"
    ),
    _computed("use_torch_fsdp2", "parallel.zero", "3"),
    _computed(
        "num_distributed_optimizer_instances",
        "mesh.dp_replicate",
        "groups that shard the optimizer on their own",
    ),
    _computed("sequence_parallel", "parallel.sequence_parallel", "with tp above 1"),
    _copied(
        "cp_comm_type",
        "parallel.cp_method",
        values={"p2p": "ring", "all_gather": "allgather", "a2a": "ulysses", "a2a+p2p": "ring"},
    ),
    _computed(
        "ds_sequence_parallel_size",
        "mesh.cp, parallel.cp_method",
        "Ulysses of Megatron-DeepSpeed",
        "sequence_parallel_size",
        "ulysses_sequence_parallel_size",
    ),
    # The model.
    _copied("num_layers", "model.n_layers", "n_layers", "num_hidden_layers", "layers"),
    _copied("hidden_size", "model.dim", "d_model", "hidden_dim"),
    _copied("num_attention_heads", "model.n_heads", "n_heads", "num_heads"),
    _computed(
        "num_query_groups",
        "model.n_kv_heads",
        "with group_query_attention; else all heads",
        "num_key_value_heads",
        "num_kv_heads",
    ),
    _computed("group_query_attention", "model.n_kv_heads", "makes num_query_groups count"),
    _computed(
        "ffn_hidden_size",
        "model.ffn",
        "of a gated layer as it is; else two thirds, which gives a gated one as many parameters",
        "intermediate_size",
    ),
    _copied("kv_channels", "model.head_dim", "head_dim"),
    _computed("swiglu", "", "ours; a layer without it is open"),
    _computed("activation_func", "", "swiglu and silu are ours", "activation", "hidden_act"),
    _computed("gated_linear_unit", "", "a width as it is; with silu it is ours"),
    _computed("glu_activation", "", "swiglu is ours; another one is open"),
    _computed("quick_geglu", "", "gated, a width as it is; the unit is open"),
    _computed("vocab_size", "model.vocab", "padded as make_vocab_size_divisible_by says"),
    _computed("padded_vocab_size", "model.vocab", "as it is", "vocab_size_padded"),
    _computed("make_vocab_size_divisible_by", "model.vocab", "128 if absent, times tp"),
    _computed(
        "tokenizer_type",
        "model.vocab",
        "a GPT-2 or Llama 2 tokenizer tells the vocabulary; another needs --set model.vocab=N",
    ),
    _computed("normalization", "", "ours is RMSNorm; another one is open", "norm_type"),
    _copied("norm_epsilon", "model.norm_eps", "layernorm_epsilon", "rms_norm_eps"),
    _computed("position_embedding_type", "", "ours is rope; another kind is open"),
    _computed("use_rotary_position_embeddings", "", "ours are always rotary"),
    _computed("no_position_embedding", "", "ours are rotary: nothing is added to the embedding"),
    _computed("rotary_base", "model.rope_theta", "10,000 if absent, with rope", "rope_theta"),
    _computed("use_rope_scaling", "model.rope_factor", "with rope_scaling_factor, 8 if absent"),
    _computed("rope_scaling_factor", "model.rope_factor", "with use_rope_scaling"),
    _computed(
        "untie_embeddings_and_output_weights",
        "model.tied",
        "without it, head and embedding are one",
    ),
    _copied("qk_layernorm", "model.qk_norm"),
    _copied("add_qkv_bias", "model.qkv_bias"),
    _computed("window_size", "model.window", "(w, 0) is a window of w + 1 tokens"),
    # Experts.
    _copied("num_experts", "model.experts", "n_experts", "num_moe_experts", "moe_num_experts"),
    _copied(
        "moe_router_topk",
        "model.experts_per_token",
        "top_k",
        "topk",
        "moe_top_k",
        "num_experts_per_tok",
        "experts_per_token",
    ),
    _computed(
        "moe_ffn_hidden_size",
        "model.expert_ffn",
        "as ffn_hidden_size",
        "moe_intermediate_size",
        "expert_ffn",
    ),
    _copied("moe_shared_expert_intermediate_size", "model.shared_ffn"),
    _computed(
        "moe_layer_freq", "model.moe_every, model.dense_layers", "a number, or zeros and then ones"
    ),
    _computed(
        "moe_router_load_balancing_type",
        "model.balance_loss",
        "aux_loss and seq_aux_loss; with none, or without a coefficient, there is no loss",
    ),
    _computed(
        "moe_aux_loss_coeff",
        "model.balance_loss",
        "ours counts each sequence, as seq_aux_loss does",
        "moe_loss_coeff",
        "aux_loss_coef",
    ),
    _copied("moe_z_loss_coeff", "model.z_loss"),
    _copied("moe_router_score_function", "model.router"),
    _computed(
        "moe_router_pre_softmax", "model.renormalise", "weights are then not divided by their sum"
    ),
    _copied("moe_router_topk_scaling_factor", "model.router_scale"),
    _copied("moe_router_num_groups", "model.expert_groups"),
    _copied("moe_router_group_topk", "model.groups_per_token"),
    _copied("moe_router_enable_expert_bias", "model.router_bias"),
    _computed("moe_router_bias_update_rate", "model.bias_rate", "with the bias"),
    _computed(
        "expert_tensor_parallel_size",
        "",
        "experts are never cut by tp: mesh.ep puts whole experts on the ranks of tp",
        "moe_extended_tp",
    ),
    # The batch and the data.
    _computed(
        "micro_batch_size",
        "data.micro_batch",
        "samples that a rank processes at once",
        "micro_batch",
        "batch_size",
    ),
    _computed("global_batch_size", "data.global_batch", "samples in a step", "global_batch"),
    _computed(
        "gradient_accumulation_steps",
        "data.global_batch",
        "global batch / (micro-batch x data-parallel ranks)",
        "num_micro_batches",
        "num_microbatches",
    ),
    _copied("seq_length", "data.seq_len", "seq_len", "sequence_length", "encoder_seq_length"),
    _computed("reset_attention_mask", "data.packing", "with reset_position_ids: documents"),
    _computed("reset_position_ids", "data.packing", "with reset_attention_mask: documents"),
    # The optimizer.
    _copied("lr", "optim.lr", "learning_rate"),
    _copied("min_lr", "optim.min_lr"),
    _computed("lr_decay_style", "optim.schedule", "linear if absent; WSD is wsd"),
    _computed("lr_decay_iters", "optim.decay", "the step that reaches min_lr"),
    _computed("lr_decay_samples", "optim.decay", "over the global batch"),
    _computed("lr_decay_tokens", "optim.decay", "over global batch x sequence"),
    _computed("lr_wsd_decay_iters", "optim.decay_steps", "with WSD"),
    _computed("lr_wsd_decay_samples", "optim.decay_steps", "over the global batch, with WSD"),
    _computed("lr_wsd_decay_style", "", "the decay of ours is linear"),
    _computed("lr_warmup_iters", "optim.warmup", "steps", "warmup_steps", "warmup_iters"),
    _computed("lr_warmup_fraction", "optim.warmup", "of the steps of the decay"),
    _computed("lr_warmup_samples", "optim.warmup", "over the global batch"),
    _computed("lr_warmup_tokens", "optim.warmup", "over global batch x sequence"),
    _computed("train_iters", "run.steps", "steps", "train_steps", "max_steps"),
    _computed("train_samples", "run.steps", "over the global batch"),
    _computed(
        "train_tokens",
        "run.steps",
        "over global batch x sequence",
    ),
    _computed("adam_beta1", "optim.betas", "0.9 if absent", "beta1"),
    _computed("adam_beta2", "optim.betas", "0.999 if absent", "beta2"),
    _copied("adam_eps", "optim.eps"),
    _copied("weight_decay", "optim.weight_decay"),
    _copied("clip_grad", "optim.clip", "gradient_clipping", "grad_clip"),
    _computed("optimizer", "", "ours is AdamW, which is adam in Megatron-LM"),
    # Precision and memory.
    _computed("bf16", "precision.compute", "bfloat16, with float32 parameters"),
    _computed(
        "precision", "precision.compute", "for a pasted dict: bf16 or fp32", "dtype", "params_dtype"
    ),
    _computed("fp16", "", "refused: composer3d has no loss scaling. Use bfloat16"),
    _computed("grad_reduce_in_bf16", "precision.reduce", "bfloat16"),
    _computed(
        "fp8_format", "precision.matmul", "float8, for a model without experts", "fp8", "fp8_hybrid"
    ),
    _computed(
        "recompute_granularity",
        "memory.activation_checkpoint",
        "selective, or full",
        "activations_checkpoint_granularity",
        "activation_checkpointing",
        "activation_checkpoint",
    ),
    _computed(
        "recompute_method",
        "memory.activation_checkpoint",
        "of full",
        "activations_checkpoint_method",
    ),
    _computed(
        "recompute_num_layers",
        "memory.activation_checkpoint",
        "of full",
        "activations_checkpoint_num_layers",
        "checkpoint_num_layers",
    ),
    _computed("recompute_activations", "memory.activation_checkpoint", "selective"),
    _computed(
        "checkpoint_activations",
        "memory.activation_checkpoint",
        "full, in older versions",
        "deepspeed_activation_checkpointing",
    ),
    # The run.
    _copied("seed", "run.seed", note="other generators: other numbers than theirs"),
    _copied("save_interval", "checkpoint.every"),
    _copied("async_save", "checkpoint.async_save"),
    _copied("log_interval", "metrics.every"),
    _copied("eval_iters", "validation.steps"),
    _computed("eval_interval", "validation.every", "0 with eval_iters 0"),
    _copied("distributed_timeout_minutes", "run.timeout_minutes"),
    _copied("deterministic_mode", "run.deterministic"),
    _computed("decoder_first_pipeline_num_layers", "parallel.stages", "with pp, without stages"),
    _computed("decoder_last_pipeline_num_layers", "parallel.stages", "likewise"),
    _computed("account_for_embedding_in_pipeline_split", "parallel.stages", "counts as a layer"),
    _computed("account_for_loss_in_pipeline_split", "parallel.stages", "counts as a layer"),
    _computed("attention_dropout", "", "composer3d has no dropout: 0 is ours, 0.1 their default"),
    _computed("hidden_dropout", "", "composer3d has no dropout: 0 is ours, 0.1 their default"),
    _computed("disable_bias_linear", "", "ours; linear layers with biases are open"),
    _computed("add_bias_linear", "", "false is ours"),
    _computed("deepspeed_config", "", "read from a here-document of the script, or else open"),
    # What has no equal, and decides.
    *_open(_DROPOUT, "dropout lora_dropout"),
    *_open(
        "whole heads are rotated, by whole positions",
        "rotary_percent rotary_seq_len_interpolation_factor",
        fits=("1", "1.0", "none"),
    ),
    *_open(
        _LLAMA,
        """
        rotary_interleaved squared_relu openai_gelu
        apply_layernorm_1p apply_residual_connection_post_layernorm multi_latent_attention
        mtp_num_layers q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mscale
        mscale_all_dim rotary_scaling_factor layernorm_zero_centered_gamma add_position_embedding
        experimental_attention_variant linear_attention_freq hybrid_layer_pattern
        hybrid_override_pattern is_hybrid_model mamba_* dsa_* retro_* bert_* qk_l2_norm qk_clip
        softmax_type no_rope_freq glu_linear_offset activation_func_clamp_value moe_latent_size
        moe_shared_expert_gate moe_input_jitter_eps attention_output_gate embed_layernorm
        relative_attention_num_buckets fp32_residual_connection use_mup heterogeneous_*
        encoder_num_layers decoder_num_layers decoder_seq_length num_layers_per_stage yarn_*
        mrope_section cross_attention mlp_type enable_mhc_connections
        """,
        fits=(*_OFF, "vanilla", "standard"),
    ),
    *_open(
        _ALIKE,
        """
        rampup_batch_size step_batch_size_schedule start_weight_decay end_weight_decay
        lr_warmup_init decoupled_lr decoupled_min_lr head_lr_mult apply_wd_to_qk_layernorm
        decrease_batch_size_if_needed
        """,
    ),
    *_open(_ALIKE, "weight_decay_incr_style", fits=("constant",)),
    *_open(
        _EXACT,
        """
        moe_expert_capacity_factor moe_train_capacity_factor capacity_factor drop_tokens
        moe_token_dropping moe_expert_rank_capacity_factor
        """,
        fits=(*_OFF, "-1", "-1.0"),
    ),
    *_open(
        _CUT,
        """
        pipeline_model_parallel_layout standalone_embedding_stage num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_split_rank
        """,
    ),
    *_open(
        "the ranks of these axes lie in another order, or shard in another way",
        """
        use_tp_pp_dp_mapping outer_dp_sharding_strategy enable_full_sharding_in_hsdp
        hierarchical_context_parallel_sizes hybrid_context_parallel use_hier_sharding
        torch_fsdp2_no_reshard_after_forward tensor_parallel_num_weight_shards gtp_*
        """,
        fits=(*_OFF, "no_shard"),
    ),
    *_open(
        "parameters, sums of gradients and moments are in precision.params, float32",
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        fits=("fp32", "float32", "torch.float32"),
    ),
    *_open(_NO_ARITHMETIC, "fp4 fp4_format fp4_recipe fp4_param kitchen_* quant_recipe"),
    *_open(_OTHER_FILE, "yaml_cfg spec use_checkpoint_args use_mp_args_from_checkpoint_args"),
    *_open(
        "the schedule would come from a checkpoint",
        "use_checkpoint_opt_param_scheduler",
    ),
    *_open(
        _OTHER_JOB,
        """
        sft skip_train perform_rl_step rl_* grpo_* kd kd_* load_teacher fim_* random_ltd
        curriculum_learning data_efficiency_curriculum_learning freeze_* langrl_* peft peft_*
        """,
    ),
    # What has no equal, and changes nothing of these.
    Word("max_position_embeddings", note="positions are rotary, of any length", fits=_ANY),
    *_without_equal(
        _INIT,
        """
        init_method_std init_method_xavier_uniform use_cpu_initialization embedding_init_method_std
        perform_initialization data_parallel_random_init
        """,
    ),
    *_without_equal(
        _EXACT,
        """
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_eval_capacity_factor
        moe_min_capacity disable_moe_token_dropping
        """,
    ),
    *_without_equal(
        "the first and last layers compute as all others",
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    ),
    *_without_equal(
        "similar: parallel.async_tp, with compile.enabled", "tp_comm_overlap tp_comm_overlap_cfg"
    ),
    *_without_equal(
        "only the optimizer would go to the host; memory.cpu_offload takes parameters as well",
        """
        optimizer_cpu_offload optimizer_offload_fraction cpu_optimizer overlap_cpu_optimizer_d2h_h2d
        use_torch_optimizer_for_cpu_offload cpu_torch_adam no_pin_cpu_grads no_pin_cpu_params
        """,
    ),
    *_without_equal(
        "parameters, sums of gradients and moments are in precision.params, float32",
        "use_precision_aware_optimizer fp8_param_gather fp8_param",
    ),
    *_without_equal(
        "float8 has one kind of scaling here (docs/performance.md)",
        """
        fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
        no_fp8_wgrad
        """,
    ),
    *_without_equal(
        _FILES,
        """
        data_path train_data_path valid_data_path test_data_path split data_cache_path mock_data
        dataloader_type data_impl num_workers dataset data_args_path per_split_data_args_path
        *_idx_path mmap_warmup no_mmap_bin_files no_create_attention_mask_in_dataloader
        create_attention_mask_in_dataloader num_dataset_builder_threads dataloader_*
        multiple_validation_sets full_validation path_to_cache object_storage_cache_path
        eval_micro_batch_size eval_global_batch_size data_sharding no_data_sharding
        train_data_exact_num_epochs
        """,
    ),
    *_without_equal(
        _TOKENIZER,
        """
        vocab_file merge_file tokenizer_model tokenizer_name_or_path vocab_extra_ids
        tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens tokenizer_*
        trust_remote_code chat_template
        """,
    ),
    *_without_equal(
        "the loss has all tokens of a sample; data.packing stops at the end of a document",
        "eod_mask_loss",
    ),
    *_without_equal(_FOLDER, "save tensorboard_dir wandb_save_dir output_dir save_config_filepath"),
    *_without_equal(
        "a run ends after run.steps, or by a signal",
        """
        exit_interval exit_duration_in_mins adlr_autoresume adlr_autoresume_interval
        kill_switch_file
        """,
    ),
    *_without_equal(
        _RESUME,
        """
        load no_load_optim no_load_rng no_save_optim no_save_rng finetune pretrained_checkpoint
        exit_on_missing_checkpoint use_dist_ckpt auto_detect_ckpt_format ckpt_* dist_ckpt_*
        override_opt_param_scheduler async_ckpt_* async_strategy non_persistent_* load_optim
        load_rng save_optim save_rng no_load_lr_state most_recent_k save_retain_interval
        use_persistent_ckpt_worker universal_checkpoint verify_integrity fully_parallel_save
        fully_parallel_load strict_fsdp_dtensor_load
        """,
    ),
    *_without_equal(
        _LOSS_SCALE, "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
    ),
    *_without_equal(
        _LOGGING,
        """
        log_* no_log_* timing_log_level timing_log_option tensorboard_* wandb_* one_logger_*
        no_one_logger enable_one_logger moe_per_layer_logging logging_level otel_* straggler_*
        app_tag_run_* config_logger_dir filter_warnings set_level_for_all_loggers nvtx_ranges
        throughput_window_size barrier_with_L1_time no_barrier_with_level_1_timing
        check_for_spiky_loss check_for_large_grads rerun_mode check_for_nan_in_loss_and_grad
        no_check_for_nan_in_loss_and_grad check_for_nan_in_grad runtime_time_unit
        check_weight_hash_across_dp_replicas_interval logger.*
        """,
        fits=_ANY,
    ),
    *_without_equal(
        _PROFILER,
        """
        profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler
        use_nsys_profiler record_memory_history memory_snapshot_path record_shapes
        pytorch_profiler_* profiling.*
        """,
        fits=_OFF,
    ),
    *_without_equal(
        _KERNELS,
        """
        use_flash_attn use_flash_attn_v1 use_flash_attn_v2 use_flash_attn_triton
        use_flash_attn_builder attention_backend flash_attention_version flash_decode
        transformer_impl use_mcore_models use_legacy_models moe_grouped_gemm
        moe_use_legacy_grouped_gemm moe_permute_fusion moe_token_dispatcher_type
        moe_enable_deepep moe_deepep_num_sms moe_flex_dispatcher_* moe_hybridep_*
        moe_router_dtype moe_shared_expert_overlap moe_router_fusion
        moe_router_padding_for_fp8 moe_router_padding_for_quantization
        *_fusion no_persist_layer_norm persist_layer_norm
        no_async_tensor_model_parallel_allreduce cross_entropy_fusion_impl
        attention_softmax_in_fp32 apply_query_key_layer_scaling no_query_key_layer_scaling
        enable_cuda_graph external_cuda_graph cuda_graph_* use_fused_rmsnorm
        distribute_saved_activations recompute_modules empty_unused_memory_level manual_gc
        manual_gc_interval manual_gc_eval accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32
        calculate_per_token_loss moe_layer_recompute DDP_impl use_te distributed_backend
        init_model_with_meta_device te_rng_tracker use_te_rng_tracker disable_jit_fuser
        use_transformer_engine_op_fuser cpu_offloading cpu_offloading_* offload_modules
        fine_grained_activation_offloading min_offloaded_tensor_size fine_grained_offloading_*
        clone_scatter_output_in_embedding disable_bf16_reduced_precision_matmul
        disable_mem_efficient_ln memory_efficient_layer_norm synchronize_each_layer
        contigious_checkpointing checkpoint_in_cpu partition_activations profile_backward
        ds_fused_adam use_sharp inference_* use_dataset_only enable_experimental
        batch_invariant_mode use_fused_weighted_squared_relu fused_residual_rmsnorm
        """,
        fits=_ANY,
    ),
    *_without_equal(
        _OVERLAP,
        """
        overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step
        no_overlap_p2p_communication overlap_p2p_comm overlap_p2p_communication batch_p2p_comm
        batch_p2p_communication batch_p2p_sync defer_embedding_wgrad_compute wgrad_deferral_limit
        ddp_bucket_size ddp_num_buckets ddp_average_in_collective average_in_collective
        microbatch_group_size_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage
        overlap_moe_expert_parallel_comm delay_wgrad_compute align_param_gather align_grad_reduce
        no_align_param_gather deallocate_pipeline_outputs no_scatter_gather_tensors_in_pipeline
        ddp_pad_buckets_for_high_nccl_busbw pad_buckets_for_high_nccl_busbw fsdp_*
        megatron_fsdp_* suggested_communication_unit_size gradient_reduce_div_fusion tp_comm_*
        high_priority_stream_groups zero_*_bucket_size zero_contigious_gradients
        zero_reduce_scatter no_contiguous_buffers_in_local_ddp nccl_ub use_nccl_ub
        """,
        fits=_ANY,
    ),
    *_without_equal(
        _LAUNCHER,
        """
        node_rank master_addr master_port rdzv_id rdzv_backend rdzv_endpoint rdzv_conf
        max_restarts tee log_dir hostfile include exclude local_rank local_addr launcher deepspeed
        no_pipeline_parallel exit_signal exit_signal_handler exit_signal_handler_* redirects
        local_ranks_filter standalone no_python run_path module monitor_interval start_method
        distributed_timeout_seconds_after_init nccl_communicator_config_path
        disable_gloo_process_groups use_gloo_process_groups inprocess_* enable_ft_package
        calc_ft_timeouts error_injection_* flight_recorder_* force_multi high_priority
        bind_cores_to_rank no_ssh lazy_mpu_init use_ring_exchange_p2p role ft_*
        """,
        fits=_ANY,
    ),
]

_ZERO_BUFFERS = "sizes of buffers; FSDP gathers and reduces block by block"

DEEPSPEED = [
    _computed("train_batch_size", "data.global_batch", "samples in a step"),
    _computed("train_micro_batch_size_per_gpu", "data.micro_batch", "samples at once"),
    _computed(
        "gradient_accumulation_steps",
        "data.global_batch",
        "global batch / (micro-batch x data-parallel ranks)",
    ),
    _computed(
        "data_parallel_size", "mesh.dp_shard, mesh.dp_replicate", "if somebody wrote it", "dp"
    ),
    _computed(
        "tensor_parallel.autotp_size",
        "mesh.tp",
        "ranks that share each layer",
        "tensor_parallel.tp_size",
        "tensor_parallel.tp.tp_size",
        "tensor_parallel.size",
        "tensor_parallel_size",
        "model_parallel_size",
    ),
    _computed(
        "pipeline_parallel_size",
        "mesh.pp",
        "pipeline ranks",
        "pipeline.stages",
        "pipeline.num_stages",
        "pipeline_parallel.pp_size",
        "pipeline_parallel.size",
    ),
    _computed("sequence_parallel_size", "mesh.cp, parallel.cp_method", "ulysses"),
    _computed(
        "expert_parallel.autoep_size",
        "mesh.ep",
        "ranks that share experts, if expert_parallel.enabled",
        "expert_parallel.ep_size",
        "expert_parallel_size",
        "moe.ep_size",
    ),
    _computed("expert_parallel.enabled", "mesh.ep", "false: autoep_size does not count"),
    _computed(
        "expert_parallel.expert_tensor_parallel_size", "", "experts are never cut by tp; 1 is ours"
    ),
    _computed(
        "zero_optimization.stage",
        "parallel.zero",
        "0 to 3; with pp, 2 is 1: gradients stay whole until the last micro-batch",
    ),
    _computed("zero_optimization.offload_optimizer.device", "memory.cpu_offload", "cpu"),
    _computed("zero_optimization.offload_param.device", "memory.cpu_offload", "cpu"),
    _computed("torch_autocast.enabled", "precision.compute", "with torch_autocast.dtype"),
    _computed("torch_autocast.dtype", "precision.compute", "bfloat16; float16 is refused"),
    _computed("bf16.enabled", "precision.compute", "bfloat16", "bfloat16.enabled"),
    _computed("fp16.enabled", "", "refused: composer3d has no loss scaling. Use bf16"),
    _computed(
        "communication_data_type", "precision.reduce", "bfloat16, where shards sum gradients"
    ),
    _copied("gradient_clipping", "optim.clip"),
    _computed(
        "optimizer.type", "", "ours is AdamW: Adam, AdamW, FusedAdam and CPUAdam; others are open"
    ),
    _copied("optimizer.params.lr", "optim.lr"),
    _copied("optimizer.params.betas", "optim.betas"),
    _copied("optimizer.params.eps", "optim.eps"),
    _copied("optimizer.params.weight_decay", "optim.weight_decay"),
    _computed(
        "scheduler.type",
        "optim.schedule",
        "WarmupLR is constant, WarmupDecayLR linear, WarmupCosineLR cosine",
    ),
    _copied("scheduler.params.warmup_num_steps", "optim.warmup"),
    _computed("scheduler.params.total_num_steps", "run.steps", "also the end of the decay"),
    _computed("scheduler.params.warmup_max_lr", "optim.lr", "the peak"),
    _computed("scheduler.params.cos_min_ratio", "optim.min_lr", "times the peak"),
    _computed(
        "activation_checkpointing.*",
        "memory.activation_checkpoint",
        "full, if the section is there; its options are not",
    ),
    _copied("steps_per_print", "metrics.every"),
    *_without_equal(
        "warmup is linear and starts at lr / warmup",
        """
        scheduler.params.warmup_min_lr scheduler.params.warmup_type
        scheduler.params.warmup_min_ratio
        """,
    ),
    *_open(
        "ours is always decoupled, as in AdamW", "optimizer.params.adam_w_mode", fits=("true", "1")
    ),
    *_open(
        "set mesh.dp_shard to the ranks of a node, and mesh.dp_replicate to the nodes",
        "zero_optimization.zero_hpz_partition_size zero_optimization.mics_shard_size",
        fits=("-1", "0", "1"),
    ),
    *_open("gradients and parameters are sent whole", "zero_optimization.zero_quantized_*"),
    *_open(
        "parameters and the optimizer are in precision.params, float32",
        """
        bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
        fp16.fp16_master_weights_and_grads data_types.grad_accum_dtype
        """,
        fits=(*_OFF, "fp32", "float32"),
    ),
    *_without_equal(
        _KERNELS,
        """
        optimizer.params.torch_adam optimizer.params.fused optimizer.params.foreach
        optimizer.legacy_fusion optimizer.params.bias_correction
        torch_autocast.lower_precision_safe_modules
        """,
        fits=_ANY,
    ),
    *_without_equal(_LOSS_SCALE, "fp16.*", fits=("false",)),
    *_without_equal(
        _KERNELS,
        """
        bf16.immediate_grad_update bf16.check_grad_overflow bf16.check_overflow bf16.loss_scale
        bf16.initial_scale_power bf16.loss_scale_window bf16.hysteresis bf16.min_loss_scale
        bf16.auto_cast bfloat16.*
        """,
        fits=_ANY,
    ),
    *_without_equal(
        _ZERO_BUFFERS,
        """
        zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
        zero_optimization.*_bucket_size zero_optimization.use_multi_rank_bucket_allreduce
        zero_optimization.allgather_partitions zero_optimization.overlap_comm
        zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint
        zero_optimization.offload_param.* zero_optimization.offload_optimizer.*
        zero_optimization.sub_group_size zero_optimization.cpu_offload_use_pin_memory
        zero_optimization.*_persistence_threshold zero_optimization.*max_live_parameters
        zero_optimization.*max_reuse_distance zero_optimization.*weights_on_model_save
        zero_optimization.stage3_* zero_optimization.module_granularity_threshold
        zero_optimization.use_all_reduce_for_fetch_params zero_optimization.allgather_sequential
        zero_optimization.ignore_unused_parameters zero_optimization.legacy_stage1
        zero_optimization.round_robin_gradients zero_optimization.mics_hierarchical_params_gather
        zero_optimization.memory_efficient_linear zero_optimization.pipeline_loading_checkpoint
        zero_optimization.override_module_apply zero_optimization.log_trace_cache_warnings
        zero_optimization.enable_sanity_checks zero_optimization.leaf_module*
        zero_optimization.max_in_cpu zero_optimization.find_unused_parameters
        zero_optimization.cpu_offload_param* tensor_parallel.tp.tp_grain_size
        tensor_parallel.tp_overlap_comm tensor_parallel.tp_grain_size tensor_parallel.preset_model
        tensor_parallel.keep_module_on_host
        """,
        fits=_ANY,
    ),
    *_without_equal(
        "logs something; metrics.jsonl and TensorBoard have our own numbers",
        """
        wall_clock_breakdown tensorboard.* wandb.* csv_monitor.* comet.* comms_logger.* dump_state
        memory_breakdown monitor_config.* logging.* log_level
        """,
        fits=_ANY,
    ),
    *_without_equal(_PROFILER, "flops_profiler.*", fits=("false", "*")),
    *_without_equal(
        "checkpoints are composer3d's own (docs/checkpoints.md)", "checkpoint.*", fits=_ANY
    ),
    *_without_equal(
        "gradients are summed exactly, in float32",
        """
        prescale_gradients gradient_predivide_factor sparse_gradients disable_allgather
        gradient_allreduce_op fp32_allreduce seq_parallel_communication_data_type
        """,
        fits=(*_OFF, "mean"),
    ),
    *_open(
        "changes the size or the shape of the job while it runs, or what is trained",
        """
        elasticity.* autotuning.* curriculum_learning.* data_efficiency.* compression_training.*
        progressive_layer_drop.* sparse_attention.* amp.enabled quantize_training.*
        zero_optimization.zenflow.* hybrid_engine.*
        """,
    ),
    *_without_equal(
        _KERNELS,
        """
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer amp.* aio.* compile.*
        communication.* dataloader_drop_last activation_checkpointing expert_parallel.use_grouped_mm
        """,
        fits=_ANY,
    ),
]

TORCHTITAN = [
    _computed("model.name", "model.preset", "llama3 and qwen3", "model_spec.name"),
    _computed(
        "model.flavor", "model.preset", "such as 8B; see --model for others", "model_spec.flavor"
    ),
    *(
        _computed(f"model_spec.model.{name}", f"model.{ours}", "must be that of the flavor")
        for name, ours in (("dim", "dim"), ("vocab_size", "vocab"), ("layers", "n_layers"))
    ),
    _computed(
        "parallelism.pipeline_parallel_degree",
        "mesh.pp",
        "pipeline ranks",
        "experimental.pipeline_parallel_degree",
    ),
    _computed(
        "parallelism.data_parallel_replicate_degree",
        "mesh.dp_replicate",
        "replicas",
        "training.data_parallel_replicate_degree",
    ),
    _computed(
        "parallelism.data_parallel_shard_degree",
        "mesh.dp_shard",
        "-1: all remaining GPUs",
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
    ),
    _computed(
        "parallelism.context_parallel_degree",
        "mesh.cp",
        "ranks that share each sequence",
        "experimental.context_parallel_degree",
    ),
    _computed(
        "parallelism.tensor_parallel_degree",
        "mesh.tp",
        "ranks that share each layer",
        "training.tensor_parallel_degree",
    ),
    _copied("parallelism.enable_sequence_parallel", "parallel.sequence_parallel"),
    _computed("parallelism.expert_parallel_degree", "mesh.ep", "ranks that share experts"),
    _computed(
        "parallelism.expert_tensor_parallel_degree", "", "experts are never cut by tp; 1 is ours"
    ),
    _computed(
        "parallelism.fsdp_reshard_after_forward",
        "parallel.zero",
        "always 3, never 2, or 1 with pp; default: 3, or 1 with pp. DDP alone is 0",
        "training.fsdp_reshard_after_forward",
    ),
    _computed(
        "parallelism.disable_loss_parallel",
        "parallel.loss_parallel",
        "the opposite",
        "training.disable_loss_parallel",
        "training.enable_loss_parallel",
    ),
    _computed(
        "parallelism.enable_async_tensor_parallel",
        "parallel.async_tp",
        "with tp, compiled blocks and no float8",
        "experimental.enable_async_tensor_parallel",
        "compile.enable_async_tensor_parallel",
    ),
    _computed(
        "parallelism.pipeline_parallel_schedule",
        "parallel.schedule",
        "the same names",
        "experimental.pipeline_parallel_schedule",
    ),
    _computed(
        "parallelism.pipeline_parallel_layers_per_stage",
        "parallel.virtual_stages",
        "layers / (pp x this) stages on each rank",
    ),
    _computed(
        "parallelism.pipeline_parallel_microbatch_size", "data.micro_batch", "with pp; 1 if absent"
    ),
    _computed(
        "parallelism.num_pp_microbatches",
        "data.global_batch",
        "of a step of a rank, with pp",
        "experimental.pipeline_parallel_microbatches",
    ),
    _computed(
        "parallelism.context_parallel_rotate_method",
        "parallel.cp_method",
        "allgather, or alltoall, which is ring here",
        "experimental.context_parallel_rotate_method",
    ),
    _computed("training.local_batch_size", "data.micro_batch", "without pp", "training.batch_size"),
    _computed(
        "training.global_batch_size", "data.global_batch", "-1: local batch x data-parallel ranks"
    ),
    _computed(
        "training.num_tokens_per_microbatch_per_dp_rank",
        "data.micro_batch",
        "over max_context_length",
    ),
    _computed("training.num_tokens_per_train_step", "data.global_batch", "over max_context_length"),
    _copied("training.seq_len", "data.seq_len", "training.max_context_length"),
    _copied("training.max_norm", "optim.clip"),
    _copied("training.steps", "run.steps"),
    _copied("training.seed", "run.seed", "debug.seed", note="other numbers than theirs"),
    _copied("training.deterministic", "run.deterministic", "debug.deterministic"),
    _copied("training.enable_cpu_offload", "memory.cpu_offload"),
    _copied("training.mixed_precision_param", "precision.compute"),
    _computed("training.mixed_precision_reduce", "precision.reduce", "float32, or bfloat16"),
    _computed(
        "training.compile",
        "compile.enabled",
        "of blocks without experts",
        "training.enable_compile",
    ),
    _computed("compile.enable", "compile.enabled", "of blocks without experts"),
    _computed("model.converters", "precision.matmul", "float8, for a model without experts"),
    _computed(
        "training.enable_float8_linear",
        "precision.matmul",
        "float8",
        "float8.enable_float8_linear",
    ),
    _computed("optimizer.name", "", "ours is AdamW; others are open"),
    _computed("optimizer.param_groups", "optim.lr, optim.betas", "one group, of AdamW"),
    _copied("optimizer.lr", "optim.lr"),
    _computed("optimizer.beta1", "optim.betas", "0.9 if absent"),
    _computed("optimizer.beta2", "optim.betas", "0.95 if absent"),
    _copied("optimizer.eps", "optim.eps"),
    _copied("optimizer.weight_decay", "optim.weight_decay"),
    _computed(
        "lr_scheduler.warmup_steps", "optim.warmup", "200 if absent", "training.warmup_steps"
    ),
    _computed("lr_scheduler.total_steps", "optim.decay", "the end of the decay"),
    _computed("lr_scheduler.decay_ratio", "optim.schedule, optim.decay_steps", "wsd"),
    _computed(
        "lr_scheduler.decay_type",
        "optim.schedule",
        "linear and cosine; others are open",
        "lr_scheduler.lr_decay_type",
    ),
    _computed("lr_scheduler.min_lr_factor", "optim.min_lr", "times lr", "lr_scheduler.lr_min"),
    _computed(
        "activation_checkpoint.mode", "memory.activation_checkpoint", "none, selective, full"
    ),
    _computed(
        "activation_checkpoint.selective_ac_option",
        "memory.activation_checkpoint",
        "op: selective; N: every N blocks",
    ),
    _computed(
        "checkpoint.enable",
        "checkpoint.every",
        "a run always saves at its end",
        "checkpoint.enable_checkpoint",
    ),
    _copied("checkpoint.interval", "checkpoint.every"),
    _computed("checkpoint.keep_latest_k", "checkpoint.keep", "0: all"),
    _computed("checkpoint.async_mode", "checkpoint.async_save", "disabled, or in the background"),
    _copied("metrics.log_freq", "metrics.every"),
    _copied("metrics.enable_tensorboard", "metrics.tensorboard"),
    _computed(
        "validation.enable",
        "validation.every",
        "with validation.freq",
        "validation.enabled",
        "validator.enable",
    ),
    _computed("validation.freq", "validation.every", "with validation.enable", "validator.freq"),
    _computed("validation.steps", "validation.steps", "with validation.enable", "validator.steps"),
    _computed("training.dtype", "", "parameters are float32; bfloat16 is refused"),
    *_open(
        "the schedule of a file: set parallel.schedule_csv to a file of our form",
        "parallelism.pipeline_parallel_schedule_csv",
    ),
    *_open(
        _CUT,
        """
        parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part
        experimental.pipeline_parallel_split_points
        """,
    ),
    *_without_equal(
        _CUT,
        """
        parallelism.pipeline_parallel_first_stage_less_layers
        parallelism.pipeline_parallel_last_stage_less_layers
        """,
    ),
    *_open(
        "ours gives each rank the first and the last part of what is left of a sequence, or halves "
        "(parallel.cp_balance)",
        "parallelism.context_parallel_load_balancer",
        fits=("headtail",),
    ),
    *_open(_LLAMA, "model.norm_type", fits=("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm")),
    *_open("parts of their program would be replaced", "override.*"),
    *_open("set precision.matmul", "training.fp8_linear"),
    *_open(
        "names another file or module, which is not read: give what it says with --set",
        "job.custom_config_module experimental.custom_* experimental.custom_args_module",
    ),
    *_open(
        "the memory of activations is chosen by the compiler: set memory.activation_checkpoint",
        "activation_checkpoint.memory_budget",
        fits=("*",),
    ),
    *_open(
        "routing would be forced to equal shares, which trains no router",
        """
        training.debug_moe_force_load_balance debug.moe_force_load_balance
        """,
    ),
    *_open("ours trains all parameters: set optim.train", "model_spec.model.lora"),
    *_without_equal(
        _FILES,
        """
        training.dataset training.dataset_path validation.dataset validation.dataset_path
        validation.seq_len validation.local_batch_size validator.* dataloader.* hf_assets_path
        training.data_preprocess_num_proc training.dataset_*
        """,
    ),
    *_without_equal(
        _TOKENIZER,
        "model.tokenizer_path model.hf_assets_path model.tokenizer_type tokenizer.*",
    ),
    *_without_equal(
        "float8 has one kind of scaling here, and the head is never in float8",
        "float8.* quantize.* mx.*",
        fits=_OFF,
    ),
    *_without_equal(
        _KERNELS,
        """
        optimizer.implementation optimizer.fused optimizer.foreach training.gc_freq
        training.gc_debug training.disable_cuda_graphs compile.components compile.backend
        activation_checkpoint.* parallelism.enable_compiled_autograd
        experimental.enable_compiled_autograd training.enable_compiled_autograd
        parallelism.enable_fsdp_symm_mem parallelism.spmd_backend
        parallelism.context_parallel_ptrr_mask_key parallelism.expert_parallel_comm_backend
        parallelism.pipeline_parallel_expert_parallel_overlap
        parallelism.expert_parallel_a2a_dispatch_impl model.print_after_conversion comm.* debug.*
        memory.* model_spec.model.* loss.* training.enable_fsdp2_symm_mem
        """,
        fits=_ANY,
    ),
    *_without_equal(
        _FOLDER, "job.* checkpoint.folder metrics.save_tb_folder dump_folder", fits=_ANY
    ),
    *_without_equal(_LOGGING, "metrics.* logging.*", fits=_ANY),
    *_without_equal(
        "the gradient is clipped before the optimizer's step, as one",
        "optimizer.early_step_in_backward",
        fits=_OFF,
    ),
    *_without_equal(_RESUME, "checkpoint.*"),
    *_without_equal(_PROFILER, "profiling.* profiler.* memory_estimation.*", fits=_ANY),
    *_open(
        "a group of replicas that averages its weights every so many steps",
        "fault_tolerance.semi_sync_method fault_tolerance.sync_steps",
    ),
    *_without_equal(
        "restarts are those of torchrun; see [reliability]", "fault_tolerance.*", fits=_OFF
    ),
]

NANOTRON = [
    _computed("parallelism.dp", "mesh.dp_shard, mesh.dp_replicate", "by optimizer.zero_stage"),
    _computed("parallelism.tp", "mesh.tp", "ranks that share each layer"),
    _computed("parallelism.pp", "mesh.pp", "pipeline ranks"),
    _computed("parallelism.context_parallel_size", "mesh.cp", "ranks that share each sequence"),
    _computed("parallelism.expert_parallel_size", "mesh.ep", "a part of dp_shard x cp x tp"),
    _computed(
        "parallelism.pp_engine", "parallel.schedule", "1f1b is 1F1B; afab, the default, GPipe"
    ),
    _computed(
        "parallelism.tp_mode",
        "parallel.sequence_parallel",
        "REDUCE_SCATTER is true, ALL_REDUCE false",
    ),
    _computed("parallelism.recompute_layer", "memory.activation_checkpoint", "full"),
    _copied("model.model_config.num_hidden_layers", "model.n_layers"),
    _copied("model.model_config.hidden_size", "model.dim"),
    _copied("model.model_config.num_attention_heads", "model.n_heads"),
    _computed(
        "model.model_config.num_key_value_heads",
        "model.n_kv_heads",
        "all heads if absent",
        "model.model_config.num_kv_heads",
    ),
    _copied("model.model_config.intermediate_size", "model.ffn"),
    _computed(
        "model.model_config.vocab_size",
        "model.vocab",
        "padded as make_vocab_size_divisible_by says",
    ),
    _computed("model.make_vocab_size_divisible_by", "model.vocab", "times tp"),
    _computed("model.model_config.rms_norm_eps", "model.norm_eps", "1e-6 if absent"),
    _computed("model.model_config.rope_theta", "model.rope_theta", "10,000 if absent"),
    _computed("model.model_config.rope_scaling.*", "model.rope_factor", "of the kind llama3"),
    _copied("model.model_config.tie_word_embeddings", "model.tied"),
    _copied("model.model_config.attention_bias", "model.qkv_bias"),
    _copied("model.model_config.sliding_window_size", "model.window"),
    _computed("model.model_config.hidden_act", "", "ours is silu, gated"),
    _copied(
        "model.model_config.moe_config.num_experts",
        "model.experts",
        "model.model_config.moe_num_experts",
    ),
    _copied(
        "model.model_config.moe_config.top_k",
        "model.experts_per_token",
        "model.model_config.num_experts_per_tok",
    ),
    _copied("model.model_config.moe_config.moe_intermediate_size", "model.expert_ffn"),
    _computed(
        "model.model_config.moe_config.enable_shared_expert", "model.shared_ffn", "with its width"
    ),
    _computed(
        "model.model_config.moe_config.shared_expert_intermediate_size",
        "model.shared_ffn",
        "with enable_shared_expert",
    ),
    _copied(
        "model.model_config.moe_config.router_aux_loss_coef",
        "model.balance_loss",
        note="ours counts each sequence, and each layer adds its loss",
    ),
    _computed("model.dtype", "precision.compute", "bfloat16; float16 is refused"),
    _computed("tokens.micro_batch_size", "data.micro_batch", "samples at once"),
    _computed(
        "tokens.batch_accumulation_per_replica",
        "data.global_batch",
        "x micro-batch x data-parallel ranks",
    ),
    _copied("tokens.sequence_length", "data.seq_len"),
    _copied("tokens.train_steps", "run.steps"),
    _computed("tokens.val_check_interval", "validation.every", "-1: never"),
    _computed("tokens.limit_val_batches", "validation.steps", "with val_check_interval"),
    _computed("optimizer.optimizer_factory.name", "", "ours is AdamW"),
    _computed(
        "optimizer.optimizer_factory.adam_beta1", "optim.betas", "0.9", "optimizer.adam_beta1"
    ),
    _computed(
        "optimizer.optimizer_factory.adam_beta2", "optim.betas", "0.95", "optimizer.adam_beta2"
    ),
    _copied("optimizer.optimizer_factory.adam_eps", "optim.eps", "optimizer.adam_eps"),
    _computed("optimizer.zero_stage", "parallel.zero", "0 and 1; with 0, dp is mesh.dp_replicate"),
    _copied("optimizer.weight_decay", "optim.weight_decay"),
    _computed("optimizer.clip_grad", "optim.clip", "null: 0, no clipping"),
    _computed("optimizer.accumulate_grad_in_fp32", "", "gradients are always summed in float32"),
    _copied("optimizer.learning_rate_scheduler.learning_rate", "optim.lr"),
    _copied("optimizer.learning_rate_scheduler.lr_warmup_steps", "optim.warmup"),
    _computed("optimizer.learning_rate_scheduler.lr_warmup_style", "", "ours is linear"),
    _computed(
        "optimizer.learning_rate_scheduler.lr_decay_style",
        "optim.schedule",
        "linear and cosine; 1-sqrt has no equal",
    ),
    _computed("optimizer.learning_rate_scheduler.lr_decay_steps", "optim.decay", "from its start"),
    _computed(
        "optimizer.learning_rate_scheduler.lr_decay_starting_step",
        "optim.decay, optim.decay_steps",
        "after the warmup: wsd",
    ),
    _computed(
        "optimizer.learning_rate_scheduler.min_decay_lr", "optim.min_lr", "the peak if absent"
    ),
    _computed("general.run", "run.name", "without %date and %jobid"),
    _copied("general.seed", "run.seed", note="other numbers than theirs"),
    _copied("checkpoints.checkpoint_interval", "checkpoint.every"),
    _copied("logging.iteration_step_info_interval", "metrics.every"),
    *_without_equal(_FILES, "data_stages.* data_stages data.*"),
    *_without_equal(_TOKENIZER, "tokenizer.*"),
    *_without_equal(_INIT, "model.init_method.* model.model_config.initializer_range"),
    *_without_equal(
        "ids of tokens belong to the data",
        """
        model.model_config.bos_token_id model.model_config.eos_token_id
        model.model_config.pad_token_id
        """,
        fits=_ANY,
    ),
    *_without_equal(
        "positions are rotary, of any length",
        "model.model_config.max_position_embeddings",
        fits=_ANY,
    ),
    *_open(
        _LLAMA,
        """
        model.model_config.rope_interleaved model.model_config.interleaved_rotary
        model.model_config.no_rope_layer model.init_method.use_mup
        model.model_config.rope_seq_len_interpolation_factor model.model_config.z_loss_enabled
        model.model_config.moe_config.layers model.model_config.pretraining_tp
        model.model_config.is_mamba_config model.model_config.is_starcoder2_config
        """,
        fits=(*_OFF, "[-1]", "1"),
    ),
    *_without_equal(
        _KERNELS,
        """
        model.model_config.is_llama_config model.model_config.is_qwen2_config
        model.model_config.use_cache model.model_config._attn_implementation
        model.model_config._use_qkv_packed model.model_config._use_doc_masking
        model.model_config._fused_* model.model_config.flex_attention_mask
        model.model_config.is_moe model.model_config.moe_config.use_torch_permute
        model.model_config.moe_config.token_dispatcher_type
        model.model_config.moe_config.use_haystack
        model.model_config.z_loss_coefficient model.model_config.log_attn_probs
        model.model_config.ring_attn_heads_k_stride
        model.model_config._use_* model.ddp_bucket_cap_mb
        optimizer.optimizer_factory.torch_adam_is_fused optimizer.torch_adam_is_fused
        parallelism.tp_linear_async_communication parallelism.tp_recompute_allgather
        parallelism.moe_layer_recompute
        """,
        fits=_ANY,
    ),
    *_open(
        "all matrices decay, and no vector",
        "optimizer.weight_decay_exclude_named_params",
        fits=(*_OFF,),
    ),
    *_without_equal(_FOLDER, "checkpoints.checkpoints_path general.project", fits=_ANY),
    *_without_equal(
        _RESUME,
        "checkpoints.* general.step general.consumed_train_samples",
        fits=(*_OFF, "true"),
    ),
    *_without_equal(
        _LOGGING,
        "logging.* metrics_logging.* metrics_logging general.* lighteval.* lighteval",
        fits=_ANY,
    ),
    *_without_equal(_PROFILER, "profiler.* profiler", fits=_OFF),
    *_without_equal("checkpoints stay in the run's folder", "s3_upload.* s3_upload", fits=_OFF),
    *_without_equal(
        "there is no test set during a training",
        "tokens.limit_test_batches",
        fits=_OFF,
    ),
]

AUTOMODEL = [
    _computed("distributed.tp_size", "mesh.tp", "ranks that share each layer"),
    _computed("distributed.pp_size", "mesh.pp", "pipeline ranks"),
    _computed("distributed.cp_size", "mesh.cp", "ranks that share each sequence"),
    _computed("distributed.ep_size", "mesh.ep", "a part of dp_shard x cp x tp"),
    _computed("distributed.dp_size", "mesh.dp_shard, mesh.dp_replicate", "none: what is left"),
    _computed("distributed.dp_replicate_size", "mesh.dp_replicate", "replicas"),
    _computed(
        "distributed.strategy",
        "parallel.zero",
        "fsdp2 is 3, ddp 0",
        "distributed._target_",
    ),
    _copied("distributed.sequence_parallel", "parallel.sequence_parallel"),
    _computed(
        "distributed.pipeline.pp_schedule",
        "parallel.schedule",
        "the same names",
        "autopipeline.pp_schedule",
    ),
    _computed(
        "distributed.pipeline.pp_microbatch_size",
        "data.micro_batch",
        "with pp",
        "autopipeline.pp_microbatch_size",
    ),
    _computed(
        "distributed.activation_checkpointing", "memory.activation_checkpoint", "full, or none"
    ),
    _computed("step_scheduler.local_batch_size", "data.micro_batch", "without pp"),
    _computed("step_scheduler.global_batch_size", "data.global_batch", "samples in a step"),
    _copied("step_scheduler.max_steps", "run.steps"),
    _copied("step_scheduler.ckpt_every_steps", "checkpoint.every"),
    _copied("rng.seed", "run.seed", "seed", note="other numbers than theirs"),
    _copied("dataset.seq_length", "data.seq_len", "dataset.seq_len"),
    _computed("packed_sequence.packed_sequence_size", "data.seq_len", "0: samples are not packed"),
    _computed("model.pretrained_model_name_or_path", "model.preset", "give --model PRESET"),
    _computed("model.config.pretrained_model_name_or_path", "model.preset", "give --model PRESET"),
    _computed("model.torch_dtype", "precision.params", "float32, or bfloat16"),
    _computed("optimizer._target_", "", "ours is AdamW; others are open"),
    _copied("optimizer.lr", "optim.lr"),
    _copied("optimizer.betas", "optim.betas"),
    _copied("optimizer.eps", "optim.eps"),
    _copied("optimizer.weight_decay", "optim.weight_decay"),
    _computed("lr_scheduler.lr_decay_style", "optim.schedule", "constant if absent"),
    _copied("lr_scheduler.lr_warmup_steps", "optim.warmup"),
    _copied("lr_scheduler.min_lr", "optim.min_lr"),
    _copied("clip_grad_norm.max_norm", "optim.clip"),
    _computed("compile.enabled", "compile.enabled", "of blocks without experts"),
    _computed("fp8.enabled", "precision.matmul", "float8, for a model without experts"),
    *_open(_OTHER_JOB, "peft.* quantization.* teacher_* kd_* kd_ratio qat.* recipe_args.*"),
    *_open(_CUT, "distributed.pipeline.layers_per_stage autopipeline.layers_per_stage"),
    *_open("ours is always decoupled, as in AdamW", "optimizer.adam_w_mode", fits=("true", "1")),
    *_without_equal(
        "the recipe trains on a text; which class of theirs does it is not read",
        "recipe recipe._target_ model._target_ model.config._target_ loss_fn.* step_scheduler.*",
        fits=_ANY,
    ),
    *_without_equal(
        _FILES,
        "dataset.* validation_dataset* dataloader.* validation_dataloader.* packed_sequence.*",
    ),
    *_without_equal(_TOKENIZER, "tokenizer.*"),
    *_without_equal(_RESUME, "checkpoint.*"),
    *_without_equal(_LOGGING, "wandb.* mlflow.* logging.* comet.* ci.*", fits=_ANY),
    *_without_equal(_LAUNCHER, "dist_env.* slurm.* skypilot.* rng.*", fits=_ANY),
    *_without_equal(_PROFILER, "nvtx benchmark.*", fits=_ANY),
    *_without_equal(
        _KERNELS,
        """
        model.backend.* model.attn_implementation model.trust_remote_code model.use_liger_kernel
        model.use_sdpa_patching compile.* fp8.* optimizer.foreach optimizer.fused
        optimizer.bias_correction optimizer.master_weights optimizer.store_param_remainders
        distributed.defer_fsdp_grad_sync distributed.pipeline.* autopipeline.* distributed.moe.*
        distributed.enable_fsdp2_prefetch distributed.patch_is_packed_sequence
        distributed.reshard_after_forward model.load_base_model model.force_hf
        model.output_hidden_states parallelizer.*
        """,
        fits=_ANY,
    ),
]

# The tables, by the name of the program.
WORDS: dict[str, list[Word]] = {
    "Megatron-LM": MEGATRON,
    "DeepSpeed": DEEPSPEED,
    "torchtitan": TORCHTITAN,
    "nanotron": NANOTRON,
    "NeMo Automodel": AUTOMODEL,
}

# Words of the tables that other programs have as well: they tell no program.
SHARED = _names(
    """
    lr seed bf16 fp16 optimizer weight_decay precision world_size dropout hidden_size num_layers
    num_attention_heads vocab_size padded_vocab_size position_embedding_type normalization
    max_position_embeddings attention_dropout hidden_dropout activation_func min_lr num_experts
    gradient_accumulation_steps zero_stage data_parallel_size load save split dataset num_workers
    output_dir tokenizer_type tokenizer_name_or_path num_query_groups train_data_path
    data_path trust_remote_code profile include exclude module role standalone tee launcher
    deepspeed local_rank node_rank nnodes nproc_per_node master_addr master_port hostfile log_dir
    peft kd warmup fp8_format fp4 use_cache use_flash_attn add_bias_linear rotary_percent
    """
)
# Sections of a configuration of Megatron-Bridge, whose keys are mostly those of Megatron-LM.
BRIDGE_SECTIONS = _names(
    """
    model train optimizer scheduler checkpoint logger rng ddp dist dataset tokenizer profiling
    mixed_precision comm_overlap validation ft straggler nvrx_straggler peft
    """
)


def index_of(words: list[Word]) -> dict[str, Word]:
    """Return the words by each of their names and aliases."""
    return {name: word for word in words for name in (word.name, *word.aliases)}


def find_word(index: Mapping[str, Word], name: str) -> Word | None:
    """Return the word of a name: the word itself, or that of the longest pattern that fits."""
    if name in index:
        return index[name]
    patterns = [key for key in index if "*" in key and fnmatchcase(name, key)]
    return index[max(patterns, key=len)] if patterns else None
