#!/bin/bash
# Megatron-DeepSpeed: tp 2, pp 2, dp 4, ZeRO 1, bf16
TP=2
PP=2
NODES=2
GPUS_PER_NODE=8
ZERO_STAGE=1
MICRO_BATCH=8
GLOBAL_BATCH=1024
cat <<EOT > ds_config.json
{
  "train_batch_size": $GLOBAL_BATCH,
  "train_micro_batch_size_per_gpu": $MICRO_BATCH,
  "gradient_accumulation_steps": 4,
  "zero_optimization": {"stage": $ZERO_STAGE},
  "bf16": {"enabled": true},
  "gradient_clipping": 1.0
}
EOT
deepspeed --num_nodes $NODES --num_gpus $GPUS_PER_NODE pretrain_gpt.py \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size $MICRO_BATCH --global-batch-size $GLOBAL_BATCH \
    --train-iters 100000 --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --clip-grad 1.0 --bf16 \
    --deepspeed --deepspeed_config ds_config.json --zero-stage $ZERO_STAGE
