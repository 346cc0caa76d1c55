"""Configurations of other programs for tests, and a shorter way to import them."""

from collections.abc import Sequence
from pathlib import Path

from composer3d.imports.result import Imported, import_file
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import mention

MEGATRON = """\
#!/bin/bash
# A comment with an 'apostrophe
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"2"}
export WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=2

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_port 6000"
GPT_ARGS="
    --num-layers 8
    --hidden-size 1024 \\
    --num-attention-heads 16
"
TRAIN_ARGS=(
    --micro-batch-size 2     # samples
    --global-batch-size 64
    --train-iters 1000
    --lr 3.0e-4
    --seq-length 2048
    --bf16
)
TRAIN_ARGS+=(--swiglu --normalization RMSNorm --position-embedding-type rope)
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    $GPT_ARGS "${TRAIN_ARGS[@]}" \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size=2 \\
    --sequence-parallel --use-distributed-optimizer --disable-bias-linear \\
    --attention-dropout 0 --hidden-dropout 0 --vocab-size 50257
"""

DEEPSPEED = """\
{
  "train_batch_size": 1024,
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 0.5,
  "zero_optimization": {"stage": 1, "overlap_comm": true},
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": "auto"}},
  "scheduler": {"type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-4, "total_num_steps": 5000}}
}
"""

TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.1
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""

NANOTRON = """\
general: {project: debug, run: tiny_%date_%jobid, seed: 7}
model:
  dtype: bfloat16
  model_config:
    hidden_act: silu
    hidden_size: 1024
    intermediate_size: 4096
    num_attention_heads: 16
    num_hidden_layers: 8
    num_key_value_heads: 4
    vocab_size: 32001
    is_llama_config: true
    tie_word_embeddings: true
optimizer:
  clip_grad: null
  learning_rate_scheduler:
    {learning_rate: 3e-4, lr_warmup_steps: 10, lr_decay_steps: 90, lr_decay_style: cosine,
     min_decay_lr: 1.0e-5}
  optimizer_factory: {adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-8, name: adamW}
  weight_decay: 0.01
  zero_stage: 1
parallelism: {dp: 4, pp: 2, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokens:
  {batch_accumulation_per_replica: 8, micro_batch_size: 2, sequence_length: 512, train_steps: 100}
"""


def imported(
    folder: Path,
    name: str,
    text: str,
    sets: Sequence[str] = (),
    *,
    gpus: int | None = None,
    model: str | None = None,
    accept: Sequence[str] = (),
) -> Imported:
    """Write a configuration to a file of ``folder`` and import it."""
    path = folder / name
    path.write_text(text)
    return import_file(str(path), sets, gpus=gpus, model=model, accept=accept)


def assert_has(recipe: Recipe, line: str) -> None:
    """Assert that a recipe has the value of a line of TOML, such as ``mesh.tp = 2``."""
    assert mention(recipe, line.partition(" ")[0]) == line
