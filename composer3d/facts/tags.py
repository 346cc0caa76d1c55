"""The tags of metrics, and what each metric is: for TensorBoard and for trackers. No torch here."""

from typing import NamedTuple


class Tag(NamedTuple):
    """The tag of a metric, and what it is."""

    name: str
    description: str


# The tokens of a step are data.global_batch * data.seq_len. Speeds, FLOPs and the axis of tokens
# count them all.
COUNTED_TOKENS = (
    "All tokens of the samples count: also those that fill a sample up, and those that are not "
    "learned."
)

# Any other metric has the tag NAME if it contains a "/", or else "other/NAME".
TAGS = {
    "loss": Tag("loss/train", "Mean loss of the batch of this step, in nats per valid token."),
    "mtp_loss": Tag(
        "loss/mtp",
        "Mean loss of multi-token prediction over its depths, in nats per valid token of each. "
        "Times model.mtp_loss, it is what is added to the loss.",
    ),
    "validation_loss": Tag(
        "loss/validation", "Mean loss on held-out data, in nats per valid token."
    ),
    "grad_norm": Tag("optim/grad_norm", "Norm of all gradients of the job, before clipping."),
    "grad_norm/other": Tag(
        "grad_norm/other",
        "Norm of the gradients of all other parameters, over all ranks, before clipping: the "
        "projections of multi-token prediction, and parameters of your own architecture with other "
        "names.",
    ),
    "lr": Tag(
        "optim/lr",
        "Learning rate of this step. Parameters of optim.groups have it times their lr_factor, and "
        "matrices with optim.matrix_lr one of their own.",
    ),
    "matrix_lr": Tag(
        "optim/matrix_lr",
        "Learning rate of this step for the matrices of Muon. Those of optim.groups have it times "
        "their lr_factor.",
    ),
    "tokens_per_s": Tag(
        "speed/tokens_per_s",
        "Tokens of samples per second over all ranks, since the last point, without the time of "
        "validation, of saves, of going back to a checkpoint and of comparing replicas. "
        f"{COUNTED_TOKENS}",
    ),
    "tokens_per_s_per_rank": Tag("speed/tokens_per_s_per_rank", "The same, for each rank."),
    "tflops_per_rank": Tag(
        "speed/tflops_per_rank", "FLOPs of the model's forward and backward, in TFLOP/s."
    ),
    "mfu": Tag("speed/mfu", "The same, as a share of the device's peak."),
    "cp_balance": Tag(
        "speed/cp_balance",
        "Attention scores of the busiest rank of cp over the mean; 1 at best. It is the busiest in "
        "each block and micro-batch, and of rank 0's rows.",
    ),
    "expert_load": Tag(
        "experts/load", "Tokens of the busiest expert of a layer over the mean; 1 at best."
    ),
    "dropped_tokens": Tag("experts/dropped_tokens", "Choices that no expert computed; always 0."),
    "router_entropy": Tag("experts/router_entropy", "Entropy of the routers, in nats."),
    "balance_loss": Tag("experts/balance_loss", "What balancing adds to the loss."),
    "z_loss": Tag("experts/z_loss", "What large logits of routers add to the loss."),
    "step_s": Tag("time/step_s", "Seconds of a step, the mean since the last point."),
    "data_s": Tag("time/data_s", "Seconds of a step in which rank 0 waited for data."),
    "validation_s": Tag("time/validation_s", "Seconds of validation since the last point."),
    "checkpoint_s": Tag(
        "time/checkpoint_s",
        "Seconds stopped for saves, and for going back to a checkpoint, since the last point.",
    ),
    "replicas_s": Tag("time/replicas_s", "Seconds of comparing replicas since the last point."),
    "left_out_steps": Tag("optim/left_out_steps", "Steps whose batches were left out so far."),
    "straggler_rank": Tag(
        "ranks/straggler_rank",
        "The slowest rank, when one turns slow or is slow no longer; not a number if none is slow.",
    ),
    "straggler_factor": Tag("ranks/straggler_factor", "Its own time over that of its peers."),
    "corrupt_rank": Tag("ranks/corrupt_rank", "A rank whose bits differ from its replicas'."),
    "memory_gib": Tag(
        "memory/peak_gib",
        "On a GPU, the peak of torch's tensors, the largest over ranks. On a CPU, the peak of the "
        "main process.",
    ),
    "memory_reserved_gib": Tag(
        "memory/peak_reserved_gib", "Peak of what torch's allocator has taken, largest over ranks."
    ),
    "memory_retries": Tag(
        "memory/retries",
        "How often the allocator found no room at first, the largest over ranks. If it grows, the "
        "job hardly fits.",
    ),
}
_PART_OF_NORM = "Norm of the gradients of this part of the model, over all ranks, before clipping."


def tag_of(metric: str) -> Tag:
    """Return the tag of a metric, with an empty description if nothing is known about it."""
    known = TAGS.get(metric)
    if known is not None:
        return known
    if "/" not in metric:
        return Tag(f"other/{metric}", "")
    return Tag(metric, _PART_OF_NORM if metric.startswith("grad_norm/") else "")
