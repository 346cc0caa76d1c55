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
    _set_schedule(made)


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
    path = str(found.value) if found is not None else ""
    name = path.rpartition(".")[2].lower() if path else "adamw"
    _assume_optimizer(made, path, name)
    is_adam = name == "adam" and made.value("optim.weight_decay", 0.0) == 0
    if name not in _ADAMW and not is_adam:
        made.ask("the optimizer of the recipe is AdamW, whose weight decay is decoupled", word)
    made.ignore(word)


def _set_schedule(made: Translation) -> None:
    """Set the schedule, and what it does if its section is there and does not say it."""
    made.take_choice("optim.schedule", "lr_scheduler.lr_decay_style")
    if not any(name.startswith("lr_scheduler.") for name in made.settings):
        return
    reason = "the default of lr_scheduler"
    made.assume("optim.schedule", "cosine", reason)
    steps, lr = made.value("run.steps"), made.value("optim.lr")
    if steps is not None:
        made.assume("optim.warmup", min(1000, steps // 10), f"{reason}: a tenth of the steps")
    if lr is not None and made.value("optim.schedule") != "constant":
        made.assume("optim.min_lr", 0.01 * lr, f"{reason}: a hundredth of lr")


def _assume_optimizer(made: Translation, path: str, name: str) -> None:
    """Set what the file does not say of an optimizer to the defaults of the class ``path``."""
    own = made.known.own
    decay = own["weight_decay"].get(f"{path.partition('.')[0].lower()} {name}")
    defaults = {**own["adam"], "optim.weight_decay": decay}
    absent = [key for key in defaults if key not in made.values and key not in made.overridden]
    if decay is not None:
        for key in absent:
            made.assume(key, defaults[key], f"the default of {path}")
    elif absent and name in (*_ADAMW, "adam"):
        made.ask(
            f"the file does not say {', '.join(absent)}, and the defaults of its optimizer are not "
            "known: the recipe has its own",
            key="optimizer.defaults",
        )
