"""Arguments of Megatron-LM and of Megatron-DeepSpeed."""

from pathlib import Path
from typing import Any

import pytest

from composer3d.facts.errors import RecipeError
from composer3d.imports.result import import_file
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from tests.imports.configurations import MEGATRON, assert_has, imported
from tools.prove.imports.run import CONFIGURATIONS
from tools.prove.paths import ROOT

# With these words, Muon is as ours.
MUON = "'optimizer': 'muon', 'muon_coefficient_type': 'simple', 'muon_extra_scale_factor': 0.2"
SIZES = "'num_layers': 8, 'hidden_size': 1024, 'num_attention_heads': 16, 'seq_length': 512"


def recipe_of(folder: Path, more: str = "", *, gpus: int | None = 8, **keywords: Any) -> Recipe:
    """The recipe of a dict with the entries ``more``."""
    made = imported(folder, "x.txt", f"config = {{{SIZES}, {more}}}", gpus=gpus, **keywords)
    return made.resolved.recipe


def lists_of(folder: Path, more: str, *, gpus: int | None = 8) -> Any:
    return imported(folder, "x.txt", f"config = {{{SIZES}, {more}}}", gpus=gpus).made


def test_a_script(tmp_path: Path) -> None:
    made = imported(tmp_path, "pretrain.sh", MEGATRON)
    recipe = made.resolved.recipe
    assert recipe.run.name == "pretrain"
    assert recipe.world_size == 16
    assert (recipe.mesh.pp, recipe.mesh.dp_shard, recipe.mesh.tp) == (2, 4, 2)
    assert (recipe.parallel.zero, recipe.parallel.schedule) == (1, "1F1B")
    assert recipe.parallel.sequence_parallel
    assert (recipe.data.global_batch, recipe.data.micro_batch, recipe.micro_batches) == (64, 2, 8)
    assert recipe.precision.compute == "bfloat16"
    # int(1024 x 8/3 / 64) x 64, as Megatron-LM computes it, and the defaults of its arguments.
    assert (recipe.model.dim, recipe.model.n_kv_heads, recipe.model.ffn) == (1024, 16, 2688)
    assert (recipe.model.rope_theta, recipe.model.tied) == (10_000.0, True)
    assert (recipe.optim.betas, recipe.optim.schedule) == ((0.9, 0.999), "linear")
    assert (made.made.contradictions, made.made.open) == ([], {})
    line = next(line for line in made.text.splitlines() if line.startswith("tp = "))
    assert line.split("#")[1] == " --tensor-model-parallel-size 2"


def test_muon(tmp_path: Path) -> None:
    sizes = "'lr': 1e-3, 'weight_decay': 0.0, "
    optim = recipe_of(tmp_path, f"{sizes}{MUON}").optim
    assert (optim.name, optim.momentum, optim.nesterov) == ("muon", 0.9, False)
    assert (optim.lr_scale, optim.matrix_lr) == ("match_rms_adamw", None)
    more = "'muon_momentum': 0.95, 'muon_nesterov': True, 'muon_num_ns_steps': 6"
    optim = recipe_of(tmp_path, f"{sizes}{MUON}, {more}").optim
    assert (optim.momentum, optim.nesterov, optim.newton_schulz_steps) == (0.95, True, 6)
    other = MUON.replace("0.2", "1.0")
    assert recipe_of(tmp_path, f"{sizes}{other}").optim.matrix_lr == 5e-3
    optim = recipe_of(tmp_path, f"{sizes}{MUON}, 'muon_scale_mode': 'shape_scaling'").optim
    assert (optim.lr_scale, optim.matrix_lr) == ("original", 2e-4)
    assert recipe_of(tmp_path, "'muon_momentum': 0.8").optim.name == "adamw"


@pytest.mark.parametrize(
    ("more", "heads"),
    [
        ("--num-query-groups 4", 16),  # counts only with the switch
        ("--num-query-groups 4 --group-query-attention", 4),
        ("--group-query-attention", 1),
        ("--num-key-value-heads 4", 4),  # of Megatron-DeepSpeed, which has no switch
    ],
)
def test_groups_of_heads_in_a_script(more: str, heads: int, tmp_path: Path) -> None:
    text = MEGATRON.replace("--num-attention", f"{more} --num-attention").replace("TP=2", "TP=1")
    made = imported(tmp_path, "x.sh", text)
    assert (made.resolved.recipe.model.n_kv_heads, made.made.open) == (heads, {})
    assert bool(made.made.contradictions) is (heads == 16)


def test_only_a_part_of_a_script(tmp_path: Path) -> None:
    text = "ARGS='--num-layers 8 --hidden-size 1024'\n--num-attention-heads 16 --seq-length 512"
    with pytest.raises(RecipeError, match="is not recognised by its words"):
        imported(tmp_path, "x.sh", text, gpus=1)
    with pytest.raises(RecipeError, match="does not give the sizes"):
        imported(tmp_path, "x.sh", f"{text} --train-iters 5", gpus=1)
    recipe = imported(tmp_path, "x.sh", text.replace("\n", " \\\n ${ARGS} "), gpus=1)
    assert recipe.resolved.recipe.model.n_heads == 16
    variables = (
        "A='--num-layers 8 --hidden-size 1024'\nB=(--num-attention-heads 16 --lr-decay-iters 9)\n"
    )
    assert imported(tmp_path, "x.sh", variables, gpus=1).resolved.recipe.model.dim == 1024


def test_arguments_of_the_program_are_no_values(tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --num-layers 8 a b --hidden-size 1024 --num-attention-heads 16 "
    made = imported(tmp_path, "x.sh", text + "--swiglu out.txt --lr 1e-4 c", gpus=1)
    recipe = made.resolved.recipe
    assert (recipe.model.n_layers, recipe.optim.lr, recipe.model.ffn) == (8, 1e-4, 2688)


def test_the_nodes_of_slurm(tmp_path: Path) -> None:
    text = (
        "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nsrun python pretrain_gpt.py --num-layers 8 "
    )
    text += "--hidden-size 1024 --num-attention-heads 16 --tensor-model-parallel-size 4"
    assert imported(tmp_path, "x.slurm", text).resolved.recipe.world_size == 32


def test_175b_on_512_is_our_recipe() -> None:
    """The text's configuration, and the recipe of the same layout that composer3d ships."""
    made = import_file(str(CONFIGURATIONS["megatron-175b-512"])).resolved.recipe
    ours = load(ROOT / "recipes" / "llama-175b-512-3d.toml").recipe
    assert made.mesh == ours.mesh
    assert made.parallel == ours.parallel
    assert made.memory == ours.memory
    assert made.data == ours.data
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn", "vocab"):
        assert getattr(made.model, name) == getattr(ours.model, name)


def test_64_experts_on_1024_are_our_recipe() -> None:
    found = import_file(str(CONFIGURATIONS["moe-64e-1024"]))
    made, ours = found.resolved.recipe, load(ROOT / "recipes" / "moe-64e-1024-4d.toml").recipe
    assert made.mesh == ours.mesh
    assert made.parallel.zero == ours.parallel.zero
    assert made.parallel.stages_per_rank == ours.parallel.stages_per_rank
    assert made.data == ours.data
    for name in ("dim", "n_layers", "n_kv_heads", "experts", "experts_per_token", "expert_width"):
        assert getattr(made.model, name) == getattr(ours.model, name)
    (line,) = found.made.contradictions
    assert "8 x 8 = 64 data-parallel ranks on the same 1024 GPUs" in line


def test_a_script_with_a_deepspeed_json() -> None:
    found = import_file(str(CONFIGURATIONS["megatron-deepspeed-16"]))
    recipe = found.resolved.recipe
    assert (recipe.mesh.tp, recipe.mesh.pp, recipe.mesh.dp_shard) == (2, 2, 4)
    assert (recipe.parallel.zero, recipe.precision.compute) == (1, "bfloat16")
    assert (recipe.data.global_batch, recipe.data.micro_batch) == (1024, 8)
    (line,) = found.made.contradictions
    assert "x 4 data-parallel ranks = 128: the recipe keeps 1024" in line
    assert line.endswith("as 32 micro-batches of 8 on each rank")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("'ffn_hidden_size': 4096", "model.ffn = 2752"),  # two thirds, a multiple of 64
        ("'ffn_hidden_size': 4096, 'swiglu': True", "model.ffn = 4096"),
        ("'vocab_size': 50257, 'tp': 8", "model.vocab = 51200"),
        ("'vocab_size': 50257, 'make_vocab_size_divisible_by': 1", "model.vocab = 50257"),
        ("'tokenizer_type': 'Llama2Tokenizer'", "model.vocab = 32000"),
        ("'padded_vocab_size': 999", "model.vocab = 999"),
        ("'num_query_groups': 4", "model.n_kv_heads = 4"),
        ("'num_query_groups': 1, 'group_query_attention': False", "model.n_kv_heads = 16"),
        ("'group_query_attention': True", "model.n_kv_heads = 1"),
        ("'kv_channels': 128", "model.head_dim = 128"),
        ("'window_size': (127, 0)", "model.window = 128"),
        ("'window_size': (127, 0), 'window_attn_skip_freq': 6", "model.full_every = 6"),
        ("'use_rope_scaling': True", "model.rope_factor = 8.0"),
        ("'rotary_seq_len_interpolation_factor': 4", "model.rope_factor = 4.0"),
        ("'rotary_seq_len_interpolation_factor': 4", 'model.rope_scaling = "linear"'),
        ("'rotary_seq_len_interpolation_factor': 1", 'model.rope_scaling = "llama3"'),
        ("'untie_embeddings_and_output_weights': True", "model.tied = false"),
        ("'use_distributed_optimizer': True", "parallel.zero = 1"),
        ("'zero_stage': 2", "parallel.zero = 2"),
        ("'use_torch_fsdp2': True", "parallel.zero = 3"),
        ("'use_custom_fsdp': True", "parallel.zero = 3"),
        ("'data_parallel_sharding_strategy': 'optim_grads'", "parallel.zero = 2"),
        ("'lr': 0.1", "mesh.dp_replicate = 8"),  # DDP
        (
            "'use_distributed_optimizer': True, 'num_distributed_optimizer_instances': 2",
            "mesh.dp_shard = 4",
        ),
        ("'cp': 2, 'cp_comm_type': 'a2a'", 'parallel.cp_method = "ulysses"'),
        ("'ds_sequence_parallel_size': 4", "mesh.cp = 4"),
        (
            "'pp': 2, 'virtual_stages': 2, 'global_batch_size': 32",
            'parallel.schedule = "Interleaved1F1B"',
        ),
        (
            "'pp': 2, 'num_layers_per_virtual_pipeline_stage': 1, 'global_batch': 32",
            "parallel.virtual_stages = 4",
        ),
        ("'pp': 4, 'global_batch_size': 4", 'parallel.schedule = "GPipe"'),  # 2 micro-batches
        ("'recompute_granularity': 'full'", 'memory.activation_checkpoint = "full"'),
        ("'recompute_activations': True", 'memory.activation_checkpoint = "selective"'),
        ("'bf16': True, 'fp8_format': 'hybrid', 'vocab_size': 512", 'precision.matmul = "float8"'),
        (
            "'use_distributed_optimizer': True, 'grad_reduce_in_bf16': True",
            'precision.reduce = "bfloat16"',
        ),
        ("'lr_warmup_fraction': 0.1, 'train_iters': 500", "optim.warmup = 50"),
        (
            "'lr_decay_style': 'WSD', 'lr_wsd_decay_samples': 640, 'global_batch_size': 64",
            "optim.decay_steps = 10",
        ),
        ("'train_samples': 800, 'global_batch_size': 8", "run.steps = 100"),
        ("'train_tokens': 409600, 'global_batch_size': 8", "run.steps = 100"),
        ("'lr_decay_style': 'WSD', 'lr_wsd_decay_iters': 20", "optim.decay_steps = 20"),
        ("'adam_beta2': 0.95", "optim.betas = [0.9, 0.95]"),
        ("'eval_interval': 5, 'eval_iters': 0", "validation.every = 0"),
        ("'reset_attention_mask': True, 'reset_position_ids': True", 'data.packing = "documents"'),
    ],
)
def test_an_argument(tmp_path: Path, more: str, line: str) -> None:
    assert_has(recipe_of(tmp_path, more), line)


MOE = "'num_experts': 8, 'moe_router_topk': 2, 'swiglu': True, 'ffn_hidden_size': 512"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("'moe_layer_freq': 2", "model.moe_every = 2"),
        ("'moe_layer_freq': '([0]*1+[1]*7)'", "model.dense_layers = 1"),
        ("'moe_layer_freq': [0, 0, 1, 1, 1, 1, 1, 1]", "model.dense_layers = 2"),
        ("'moe_router_pre_softmax': True", "model.renormalise = false"),
        ("'moe_router_topk': 1", "model.renormalise = false"),
        (
            "'moe_aux_loss_coeff': 0.01, 'moe_router_load_balancing_type': 'none'",
            "model.balance_loss = 0.0",
        ),
        (
            "'moe_router_enable_expert_bias': True, 'moe_router_bias_update_rate': 0.01",
            "model.bias_rate = 0.01",
        ),
        ("'moe_router_score_function': 'sigmoid'", 'model.router = "sigmoid"'),
        ("'moe_ffn_hidden_size': 256", "model.expert_ffn = 256"),
        (
            "'moe_shared_expert_intermediate_size': 512, 'moe_shared_expert_gate': True",
            "model.shared_gate = true",
        ),
    ],
)
def test_an_argument_of_experts(tmp_path: Path, more: str, line: str) -> None:
    assert_has(recipe_of(tmp_path, f"{MOE}, {more}"), line)


def test_experts_of_a_preset(tmp_path: Path) -> None:
    more = "'moe_ffn_hidden_size': 256, 'moe_aux_loss_coeff': 0.5"
    text = f"config = {{{more}}}"
    model = imported(tmp_path, "x.txt", text, gpus=8, model="debug-moe").resolved.recipe.model
    assert (model.experts, model.expert_ffn, model.balance_loss) == (8, 256, 0.5)


def test_experts_on_ranks_need_shards(tmp_path: Path) -> None:
    made = imported(tmp_path, "x.txt", f"a = {{{SIZES}, {MOE}, 'ep': 4, 'tp': 2}}", gpus=8)
    recipe = made.resolved.recipe
    assert (recipe.parallel.zero, recipe.mesh.dp_shard, recipe.mesh.ep) == (1, 4, 4)
    assert recipe.parallel.sequence_parallel
    assert any(line.endswith("has parallel.sequence_parallel = true") for line in made.made.lost)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("'dp': 2, 'tp': 2, 'pp': 2", "dp = 2, but --gpus 16 / (tp 2 x pp 2 = 4) = 4: 4 is used"),
        (
            "'global_batch': 9, 'micro_batch': 9, 'num_microbatches': 2, 'tp': 16",
            "= 18: the recipe keeps 9, as 1 micro-batches of 9 on each rank",
        ),
        (
            "'num_layers_per_virtual_pipeline_stage': 3, 'pp': 2, 'global_batch_size': 64",
            "x pp 2 = 6 does not divide 8 layers: 1 stages a rank are used",
        ),
        ("'lr_warmup_iters': 50, 'train_iters': 20", "the warmup ends at step 20"),
        ("'lr_warmup_iters': 50, 'lr_decay_iters': 20", "it ends with the run"),
        ("'lr_decay_iters': 0", "the decay would end before the first step"),
        ("'bf16': True, 'fp16': True", "both at once; bfloat16 is used"),
        (
            "'zero_stage': 1, 'use_torch_fsdp2': True",
            "zero_stage = 1, but use_torch_fsdp2 = true: 3 is used",
        ),
        (
            "'moe_router_topk': 2, 'moe_ffn_hidden_size': 9",
            "moe_ffn_hidden_size = 9 without --num-experts: there are no experts",
        ),
        ("'lr': 1e-4, 'learning_rate': 2e-4", ": learning_rate = 0.0002 is used"),
        ("'num_virtual_stages_per_pipeline_rank': 2", "there is one pipeline rank: it is dropped"),
    ],
)
def test_a_contradiction(tmp_path: Path, more: str, line: str) -> None:
    found = lists_of(tmp_path, more, gpus=16).contradictions
    assert [one for one in found if line in one], found


def test_a_world_that_does_not_fit_the_mesh(tmp_path: Path) -> None:
    made = imported(tmp_path, "x.txt", f"a = {{{SIZES}, 'tp': 8, 'world_size': 12}}")
    assert made.resolved.recipe.world_size == 8
    assert "no multiple of tp 8 = 8" in made.made.contradictions[0]
    made = imported(tmp_path, "x.txt", f"a = {{{SIZES}, 'tp': 2, 'dp': 2, 'world_size': 12}}")
    assert "= 4 ranks, not world_size = 12" in made.made.contradictions[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("'fp16': True", "no float16, which needs loss scaling; use bfloat16"),
        ("'precision': 'fp16'", "no float16"),
        ("'num_layers': 'many'", "must be a whole number of at least 0"),
        ("'tp': 3", "tensor_model_parallel_size = 3|tp = 3.*must divide|multiple of tp 3"),
        ("'tp': 0", "must be at least 1"),
        ("'bf16': 'perhaps'", "must be true or false"),
        ("'lr': 'fast'", "must be a number"),
        ("'tp': os.environ['TP']", "the value is not known here; give it with --set mesh.tp=VALUE"),
        ("'cp_comm_type': 'pigeon'", "must be one of p2p, all_gather"),
        ("'zero_stage': 4", "must be 0, 1, 2 or 3"),
        ("'micro_batch_size': 0", "must be at least 1"),
        ("'global_batch_size': 7", "data.global_batch = 7 must be a multiple"),
    ],
)
def test_a_refusal(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        recipe_of(tmp_path, more)
    assert all("/composer3d-import-" not in line for line in error.value.lines)


def test_another_tokenizer_does_not_tell_the_vocabulary(tmp_path: Path) -> None:
    text = MEGATRON.replace("--vocab-size 50257", "--tokenizer-type HuggingFaceTokenizer")
    with pytest.raises(RecipeError, match="HuggingFaceTokenizer does not tell the vocabulary"):
        imported(tmp_path, "x.sh", text)
    recipe = imported(tmp_path, "x.sh", text, ["model.vocab=128256"]).resolved.recipe
    assert recipe.model.vocab == 128256


def test_set_gives_what_a_script_leaves_open(tmp_path: Path) -> None:
    text = MEGATRON.replace("TP=2", "TP=$1").replace("--bf16", "--fp16")
    with pytest.raises(RecipeError) as error:
        imported(tmp_path, "x.sh", text)
    assert len(error.value.lines) >= 2
    sets = ["mesh.tp=2", "mesh.dp_shard=4", "precision.compute=bfloat16"]
    recipe = imported(tmp_path, "x.sh", text, sets).resolved.recipe
    assert (recipe.mesh.tp, recipe.precision.compute) == (2, "bfloat16")


@pytest.mark.parametrize(
    ("sets", "gpus", "sizes"),
    [
        (["mesh.tp=4"], None, (4, 2, 2)),  # on the 16 GPUs of the script
        (["mesh.tp=4"], 64, (4, 2, 8)),
        (["mesh.pp=1", "data.micro_batch=1"], 4, (2, 1, 2)),
        (["mesh.dp_shard=1"], None, (2, 2, 1)),
    ],
)
def test_values_of_set_change_the_number_of_ranks(
    sets: list[str], gpus: int | None, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    recipe = imported(tmp_path, "x.sh", MEGATRON, sets, gpus=gpus).resolved.recipe
    assert (recipe.mesh.tp, recipe.mesh.pp, recipe.mesh.dp_shard) == sizes
    assert recipe.data.global_batch == 64


def test_a_level_of_zero_by_set(tmp_path: Path) -> None:
    found = imported(
        tmp_path, "x.txt", f"a = {{{SIZES}, 'zero_stage': 0}}", ["parallel.zero=3"], gpus=8
    )
    assert (found.resolved.recipe.mesh.dp_shard, found.resolved.recipe.parallel.zero) == (8, 3)
    assert [line for line in found.made.taken if "zero" in line] == ["--set parallel.zero=3"]


def test_values_of_set_must_fill_the_gpus(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"= 12 processes, but the world has 16"):
        imported(tmp_path, "x.sh", MEGATRON, ["mesh.dp_shard=3", "data.global_batch=48"], gpus=16)


def test_nowhere_is_the_number_of_gpus(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"give --gpus N, a multiple of tp 2 = 2"):
        recipe_of(tmp_path, "'tp': 2", gpus=None)
    with pytest.raises(RecipeError, match=r"--gpus 7 must be a multiple of tp 2 = 2; use 6 or 8"):
        recipe_of(tmp_path, "'tp': 2", gpus=7)


OURS = (
    f"{SIZES}, 'swiglu': True, 'normalization': 'RMSNorm', 'position_embedding_type': 'rope', "
    "'disable_bias_linear': True, 'attention_dropout': 0, 'hidden_dropout': 0, 'vocab_size': 512"
)


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ("'lr': 1e-4", []),
        ("'swiglu': False, 'quick_geglu': True, 'ffn_hidden_size': 640", ["quick_geglu"]),
        ("'swiglu': False, 'squared_relu': True", ["squared_relu"]),
        ("'swiglu': False, 'glu_activation': 'geglu'", ["glu_activation"]),
        ("'normalization': 'LayerNorm'", ["normalization"]),
        ("'position_embedding_type': 'none'", ["position_embedding_type"]),
        ("'disable_bias_linear': False", ["disable_bias_linear"]),
        ("'add_qkv_bias': True", []),
        ("'hidden_dropout': 0.1", ["hidden_dropout"]),
        ("'window_size': (127, 0), 'window_attn_skip_freq': 2", []),
        ("'window_size': (127, 0), 'window_attn_skip_freq': 1", ["window_attn_skip_freq"]),
        ("'window_size': (127, 0), 'window_attn_skip_freq': [1, 0]", ["window_attn_skip_freq"]),
        ("'window_attn_skip_freq': 2", []),  # without a window it does nothing
        ("'window_size': (-1, 0), 'window_attn_skip_freq': 4", ["window_size"]),
        ("'window_size': (127, 0), 'window_attn_skip_freq': 10001", ["window_attn_skip_freq"]),
        pytest.param(
            f"'window_size': (127, 0), 'window_attn_skip_freq': '{'1' * 5_000}'",
            ["window_attn_skip_freq"],
            id="digits that Python does not parse",
        ),
        ("'window_size': (127, 127)", ["window_size"]),
        ("'multi_latent_attention': True, 'kv_lora_rank': 512", None),
        ("'mtp_num_layers': 1", ["mtp_num_layers"]),
        ("'apply_layernorm_1p': True", ["apply_layernorm_1p"]),
        ("'rampup_batch_size': '16 16 5000'", ["rampup_batch_size"]),
        ("'optimizer': 'soap'", ["optimizer"]),
        ("'optimizer': 'muon'", ["muon_coefficient_type", "matrix_decay"]),
        (f"{MUON}, 'muon_coefficient_type': 'aol'", ["muon_coefficient_type"]),
        (f"{MUON}, 'muon_scale_mode': 'unit_rms_norm'", ["muon_scale_mode"]),
        (f"{MUON}, 'muon_split_qkv': False", ["muon_split_qkv"]),
        (f"{MUON}, 'muon_tp_mode': 'blockwise'", ["muon_tp_mode"]),
        (f"{MUON}, 'muon_tp_mode': 'distributed'", []),
        (f"{MUON}, 'muon_scalar_optimizer': 'lion'", ["muon_scalar_optimizer"]),
        (MUON.replace("0.2", "1.0"), ["matrix_decay"]),
        (f"'weight_decay': 0.0, {MUON.replace('0.2', '1.0')}", []),
        ("'optimizer': 'adam'", []),
        ("'decoupled_lr': 1e-4", ["decoupled_lr"]),
        ("'lr_decay_style': 'inverse-square-root'", ["lr_decay_style"]),
        ("'lr_decay_style': 'WSD'", ["lr_wsd_decay_style"]),  # theirs is exponential
        ("'lr_decay_style': 'WSD', 'lr_wsd_decay_style': 'linear'", []),
        ("'num_experts': 8, 'moe_expert_capacity_factor': 1.25", ["moe_expert_capacity_factor"]),
        ("'num_experts': 8, 'moe_layer_freq': 2", ["moe_layer_freq"]),
        ("'exp_avg_dtype': 'bf16'", ["exp_avg_dtype"]),
        ("'precision': 'fp4'", ["precision"]),
        ("'use_tp_pp_dp_mapping': True", ["use_tp_pp_dp_mapping"]),
        ("'pp': 2, 'decoder_first_pipeline_num_layers': 3, 'global_batch_size': 64", []),
        ("'pp': 4, 'pipeline_model_parallel_layout': 'E|t*8|L'", None),
        ("'yaml_cfg': 'other.yaml'", ["yaml_cfg"]),
        # Its older versions have a token more: here, this is more rows.
        ("'tokenizer_type': 'NullTokenizer'", ["tokenizer_type"]),
        ("'tokenizer_type': 'NullTokenizer', 'vocab_size': 511", []),
        ("'a_word_of_mine': 3", ["a_word_of_mine"]),
        ("'wandb_project': 'x', 'log_interval': 5, 'ckpt_format': 'torch'", []),
    ],
)
def test_what_decides_and_is_not_expressed_is_open(
    more: str, keys: list[str] | None, tmp_path: Path
) -> None:
    said = [entry.partition(":")[0] for entry in more.split(", ")]
    ours = ", ".join(one for one in OURS.split(", ") if one.partition(":")[0] not in said)
    text = f"config = {{{ours}, {more}}}"
    made = imported(tmp_path, "x.txt", text, gpus=8)
    found = list(made.made.open)
    assert found == keys if keys is not None else found
    accepted = imported(tmp_path, "x.txt", text, gpus=8, accept=found)
    assert accepted.made.open == {}
    assert accepted.resolved.recipe == made.resolved.recipe


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ("if BIG:\n    config['num_experts'] = 8", ["num_experts"]),
        ("if BIG:\n    config['wandb_project'] = 'x'", []),
        ("config = {**BASE, **config}", ["**BASE"]),
        ("config['num_layers'] *= 2", None),
    ],
)
def test_python_text_is_not_guessed(more: str, keys: list[str] | None, tmp_path: Path) -> None:
    text = f"config = {{{OURS}}}\n{more}"
    if keys is not None:
        assert list(imported(tmp_path, "x.py", text, gpus=8).made.open) == keys
        return
    with pytest.raises(RecipeError, match=r"\*= 2: the value is not known here; give it with"):
        imported(tmp_path, "x.py", text, gpus=8)


@pytest.mark.parametrize(
    ("window", "sets", "full_every"),
    [("(127, 0)", "model.window=0", 0), ("(-1, 0)", "model.window=64", 4)],
)
def test_the_window_that_the_user_sets_decides_on_its_pattern(
    window: str, sets: str, full_every: int, tmp_path: Path
) -> None:
    text = f"config = {{{OURS}, 'window_size': {window}, 'window_attn_skip_freq': 4}}"
    made = imported(tmp_path, "x.txt", text, [sets], gpus=8)
    assert made.resolved.recipe.model.full_every == full_every
    assert made.made.open == {}


def test_a_gated_layer_keeps_its_width(tmp_path: Path) -> None:
    made = recipe_of(tmp_path, "'quick_geglu': True, 'ffn_hidden_size': 640")
    assert made.model.ffn == 640


def test_defaults_of_a_script_are_open(tmp_path: Path) -> None:
    text = "torchrun pretrain_bert.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 "
    text += "--train-iters 5 --vocab-size 300"
    assert set(imported(tmp_path, "x.sh", text, gpus=1).made.open) == {
        *("program", "swiglu", "normalization", "position_embedding_type", "disable_bias_linear"),
        *("attention_dropout", "hidden_dropout"),
    }


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ("'decoder_first_pipeline_num_layers': 3", (3, 5)),
        ("'decoder_last_pipeline_num_layers': 2", (6, 2)),
        (
            "'account_for_embedding_in_pipeline_split': 1, "
            "'account_for_loss_in_pipeline_split': True",
            (4, 4),
        ),
    ],
)
def test_the_ends_of_a_pipeline(more: str, stages: tuple[int, ...], tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, f"'pp': 2, 'global_batch_size': 64, {more}")
    assert recipe.parallel.stages == stages


MOE_OPTIONS = " --num-experts 8 --moe-router-topk 2\n"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (MEGATRON, []),
        (MEGATRON + '  "$@"', []),
        (MEGATRON.rstrip() + " $MORE_ARGS", ["$MORE_ARGS"]),
        (MEGATRON.rstrip() + " &> log --lr 1", []),
        # Conditions, loops and functions, and two commands with other values.
        (MEGATRON.replace("TP=2", "TP=2\nif [ -f x ]; then TP=4; fi"), ["TP"]),
        (MEGATRON.replace("TP=2", "if [ $1 = a ]; then TP=4; else TP=2; fi"), ["TP"]),
        (MEGATRON.replace("NNODES=$", "NNODES=1\nmany() { NNODES=2; }\nX=$"), ["NNODES"]),
        (
            MEGATRON.replace(
                "torchrun", "if x; then TRAIN_ARGS+=(--fp8-format e4m3); fi\ntorchrun"
            ),
            None,
        ),
        (
            MEGATRON.replace("torchrun", "A=\nif x; then A=--qk-layernorm; fi\ntorchrun") + " $A",
            ["A"],
        ),
        (MEGATRON.replace("torchrun", "A=\nif x; then A=$B; fi\ntorchrun") + " $A", ["A"]),
        # What decides nothing, is not used, or is set again.
        (MEGATRON.replace("TP=2", "case $S in a) L=1;; esac\nif [ -f x ]; then Z=4; fi\nTP=2"), []),
        (MEGATRON.replace("TP=2", "if x; then TP=4; fi\nTP=2"), []),
        (MEGATRON.replace("torchrun", "if x; then P=1; fi\ntorchrun") + " --save $P/a", []),
        (
            MEGATRON.replace("torchrun", "A=\nif x; then A='--save $B'; fi\ntorchrun")
            + " --load x $A",
            [],
        ),
        (MEGATRON + MEGATRON.replace("--lr 3.0e-4", "--lr 1.0e-4"), ["lr"]),
        (MEGATRON.rstrip() + MOE_OPTIONS + MEGATRON, ["num_experts", "moe_router_topk"]),
        (MEGATRON + MEGATRON.rstrip() + MOE_OPTIONS, ["num_experts", "moe_router_topk"]),
        # A program that prepares data has few of the words.
        (MEGATRON + "python tools/preprocess_data.py --vocab-size 50257 --seq-length 2048\n", []),
        # Another file may have set it again, or what an empty variable has.
        (MEGATRON.replace("TP=2", "TP=2\nsource site.sh"), ["GPUS_PER_NODE", "NNODES", "TP"]),
        (
            MEGATRON.replace("TP=2", "A=\neval $(f)\nTP=2").replace("gpt.py", "gpt.py $A"),
            ["A", "GPUS_PER_NODE", "NNODES"],
        ),
    ],
)
def test_a_script_is_not_guessed(text: str, keys: list[str] | None, tmp_path: Path) -> None:
    text = text.replace("50257\n ", "50257 ")
    found = list(imported(tmp_path, "x.sh", text).made.open)
    assert found == keys if keys is not None else found


def test_what_a_script_computes_is_refused_or_given(tmp_path: Path) -> None:
    text = MEGATRON.replace("TP=2", "TP=$((1 * 2))").replace("NODE=8", "NODE=$(nproc)")
    with pytest.raises(RecipeError) as error:
        imported(tmp_path, "x.sh", text)
    assert "$((1 * 2)): the value is not known here; give it with --set mesh.tp" in str(error.value)
    made = imported(tmp_path, "x.sh", text, ["mesh.tp=2"], gpus=16)
    assert (made.resolved.recipe.world_size, made.made.open) == (16, {})


@pytest.mark.parametrize(
    ("name", "sets", "gpus"),
    [("TP=2", ["mesh.tp=2"], None), ("NNODES=1", [], 16), ("TP=2", [], 16)],
)
def test_what_the_user_gives_settles_an_unsure_variable(
    name: str, sets: list[str], gpus: int | None, tmp_path: Path
) -> None:
    text = MEGATRON.replace("NNODES=$", "NNODES=2\nX=$")
    text = text.replace("torchrun", f"if x; then {name[:-1]}8; fi\ntorchrun")
    text = text.replace("\nDISTRIBUTED", f"\nif x; then {name[:-1]}8; fi\nDISTRIBUTED")
    is_open = not sets and name == "TP=2"
    assert bool(imported(tmp_path, "x.sh", text, sets, gpus=gpus).made.open) is is_open


def test_a_section_of_yaml_has_the_words_of_bridge(tmp_path: Path) -> None:
    text = (
        "model: {tensor_model_parallel_size: 4, context_parallel_size: 2, seq_length: 4096}\n"
        "train: {train_iters: 100, global_batch_size: 8, micro_batch_size: 1}\n"
        "optimizer: {lr: 0.0003}\nlogger: {log_interval: 10, what_ever: 1}\n"
    )
    with pytest.raises(RecipeError, match="does not give the sizes of a model"):
        imported(tmp_path, "x.yaml", text, gpus=16)
    made = imported(tmp_path, "x.yaml", text, gpus=16, model="llama3-8b")
    recipe = made.resolved.recipe
    assert (recipe.mesh.tp, recipe.mesh.cp, recipe.run.steps) == (4, 2, 100)
    assert made.made.open == {}
