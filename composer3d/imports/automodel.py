"""Translate a YAML configuration of NeMo Automodel, as far as it says the layout and the batch."""

from composer3d.imports.layout import read_layout, read_schedule, set_layout
from composer3d.imports.shared import note_parameters
from composer3d.imports.translation import Translation

_ADAMW = ("adamw", "flashadamw", "fusedadam")


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from a YAML configuration of NeMo Automodel."""
    made.take_plain_words()
    _set_model(made)
    _set_layout(made, gpus)
    _note_optimizer(made)
    made.take_choice("optim.schedule", "lr_scheduler.lr_decay_style")


def _set_model(made: Translation) -> None:
    words = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path")
    if made.model is None and not {"model.preset", "model.hf"} & made.overridden:
        made.problems.append(
            f"{made.file}: {made.words(*words) or 'the model'}: is not read; give the nearest "
            "preset with --model, or its folder with --set model.hf=DIR"
        )
    if made.words(*words):
        made.lose("weights are not read; start from them with model.hf or checkpoint.init", *words)
    note_parameters(made, "model.torch_dtype")
    length = made.number("packed_sequence.packed_sequence_size")
    if length:
        made.take("data.seq_len", length, "packed_sequence.packed_sequence_size")


def _set_layout(made: Translation, gpus: int | None) -> None:
    layout = read_layout(made)
    zero = made.choose("distributed.strategy", "parallel.zero")
    layout.set("zero", 3 if zero is None else zero, "distributed.strategy")
    # With a pipeline, a rank's batch is cut into micro-batches.
    batch, micro = "step_scheduler.local_batch_size", "distributed.pipeline.pp_microbatch_size"
    if (layout.pp or 1) > 1:
        layout.set("micro_batch", made.number(micro) or 1, micro)
    else:
        layout.set("micro_batch", made.number(batch), batch)
    made.ignore(micro, batch)
    read_schedule(made, layout, "distributed.pipeline.pp_schedule")
    set_layout(made, layout, gpus)


def _note_optimizer(made: Translation) -> None:
    """Ask about an optimizer that is not AdamW. Without weight decay, Adam is the same."""
    word = "optimizer._target_"
    found = made.get(word)
    name = str(found.value).rpartition(".")[2].lower() if found is not None else "adamw"
    is_adam = name == "adam" and made.value("optim.weight_decay", 0.0) == 0
    if name not in _ADAMW and not is_adam:
        made.ask("the optimizer of the recipe is AdamW, whose weight decay is decoupled", word)
    made.ignore(word)
