"""Translate arguments of Megatron-LM and Megatron-DeepSpeed."""

import re
from math import lcm

from composer3d.facts.ranges import MOST_LAYERS
from composer3d.imports.layout import StatedLayout, read_layout, read_world, set_layout
from composer3d.imports.literal import Unread
from composer3d.imports.shared import padded, read_dtype, set_dtype, take_betas
from composer3d.imports.translation import Translation
from composer3d.models import registry
from composer3d.recipe.schema import OptimTable

_GPT2_VOCAB = "gpt2bpetokenizer"
_GROUPS = "num-query-groups"
_LAYER_PATTERN = re.compile(r"\(?(?:\[0\]\*([0-9]{1,6})\+)?\[1\]\*([0-9]{1,6})\)?")


def translate(made: Translation, gpus: int | None) -> None:
    """Set the keys of a recipe from the arguments of Megatron-LM."""
    tp = made.number("tensor_model_parallel_size") or 1
    _set_model(made, tp)
    _set_layout(made, gpus)
    _set_precision(made)
    _set_memory(made)
    _set_optimizer(made)
    _set_schedule(made)
    _set_run(made)


# --- the layout ---


def _set_layout(made: Translation, gpus: int | None) -> None:
    layout = read_layout(made)
    ulysses = made.number("ds_sequence_parallel_size")
    if ulysses is not None and ulysses > 1 and (layout.cp or 1) == 1:
        layout.set("cp", ulysses, "ds_sequence_parallel_size")
        made.take("parallel.cp_method", "ulysses", "ds_sequence_parallel_size")
    if layout.world is None:
        read_world(made, layout, gpus)
    made.ignore("nnodes", "nproc_per_node")
    _set_zero(made, layout)
    layout.virtual_stages, words = _virtual_stages(made)
    layout.set("schedule", "1F1B", *words)
    _set_stages(made, layout)
    has_tp = (layout.tp or 1) > 1
    set_layout(made, layout, gpus)
    if has_tp:
        word = "sequence_parallel"
        note = "" if word in made.settings else "no --sequence-parallel"
        made.take("parallel.sequence_parallel", made.flag(word), word, note=note)


def _set_stages(made: Translation, layout: StatedLayout) -> None:
    """Set the cut of the pipeline if the first or the last stage has other layers than the rest."""
    ends = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
    extras = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
    names = [name for name in (*ends, *extras) if name in made.settings]
    pp, layers = layout.pp or 1, made.value("model.n_layers")
    first, last = (made.number(name) for name in ends)
    embedding, loss = (int(made.flag(name)) for name in extras)
    made.ignore(*names)
    if not names or pp == 1:
        return
    given = [one for one in (first, last) if one is not None]
    middle = pp - len(given)
    rest = (layers or 0) - sum(given) + embedding + loss
    if layers is None or (layout.virtual_stages or 1) > 1 or middle < 1 or rest % middle:
        made.ask(
            "the layers of stages are cut evenly by parameters; set parallel.stages",
            *names,
            ours="parallel.stages",
        )
        return
    stages = [rest // middle] * pp
    stages[0] = first if first is not None else stages[0] - embedding
    stages[-1] = last if last is not None else stages[-1] - loss
    made.take("parallel.stages", stages, *names)


def _set_zero(made: Translation, layout: StatedLayout) -> None:
    """Set the level of ZeRO where other words than ``zero_stage`` say it."""
    stage = layout.zero
    strategy = made.choose("data_parallel_sharding_strategy", "parallel.zero")
    if made.flag("use_torch_fsdp2"):
        layout.set("zero", 3, "use_torch_fsdp2")
    elif made.flag("use_megatron_fsdp") or strategy is not None:
        level = 3 if strategy is None else strategy
        layout.set("zero", level, "use_megatron_fsdp", "data_parallel_sharding_strategy")
    elif not stage and made.flag("use_distributed_optimizer"):
        layout.set("zero", 1, "use_distributed_optimizer")
    if stage and stage != layout.zero:
        line = f"{made.words('zero_stage')}, but {layout.words('zero')}: {layout.zero} is used"
        made.contradict(line, "zero_stage")


def _virtual_stages(made: Translation) -> tuple[int | None, tuple[str, ...]]:
    """Return the stages of each pipeline rank, and the word that gives them."""
    stages = made.number("num_virtual_stages_per_pipeline_rank")
    per_stage = made.number("num_layers_per_virtual_pipeline_stage")
    if per_stage is None:
        word = "num_virtual_stages_per_pipeline_rank"
        return stages, (word,) if stages is not None else ()
    layers = made.value("model.n_layers")
    pp = made.number("pipeline_model_parallel_size") or 1
    word = "num_layers_per_virtual_pipeline_stage"
    if layers is None or per_stage == 0:
        made.problems.append(f"{made.file}: {made.words(word)} needs --num-layers, and at least 1")
        return None, (word,)
    if layers % (pp * per_stage):
        made.contradict(
            f"{made.words(word)} x pp {pp} = {pp * per_stage} does not divide {layers} layers: "
            f"{max(1, layers // (pp * per_stage))} stages a rank are used",
            word,
        )
    computed = max(1, layers // (pp * per_stage))
    if stages is not None and stages != computed:
        made.contradict(
            f"{made.words('num_virtual_stages_per_pipeline_rank')}, but {made.words(word)} makes "
            f"{layers} / ({pp} x {per_stage}) = {computed}: {computed} is used",
            word,
        )
    return computed, (word,)


# --- the model ---


def _set_model(made: Translation, tp: int) -> None:
    experts = made.settings.get("num_experts")
    if experts is not None and str(experts.value) == "1" and made.model is None:
        made.harmless.append(experts.shown)  # no layer has a choice: they are dense
        del made.settings["num_experts"]
    made.take_plain_words()
    _set_groups(made)
    is_gated = _is_gated(made)
    _set_width(made, tp, is_gated)
    _set_vocabulary(made, tp)
    _set_positions(made)
    _note_other_layers(made, is_gated)
    if "model.experts" in made.values or made.model in registry.architecture("moe").presets:
        _set_experts(made, tp, is_gated)
    else:
        _drop_experts(made)


def _set_groups(made: Translation) -> None:
    """Set the heads of keys and values: all, or the groups that share them."""
    words = "num_query_groups", "group_query_attention"
    heads, groups = made.value("model.n_heads"), made.number(words[0])
    grouped = made.flag(words[1])
    # In a script of Megatron-LM, the number counts only with the switch. A pasted dict often lacks
    # it, and Megatron-DeepSpeed has no switch for its --num-key-value-heads.
    needs_switch = words[1] in made.settings or made.words(words[0]).startswith(f"--{_GROUPS}")
    if groups is not None and (grouped or not needs_switch):
        made.take("model.n_kv_heads", groups, *words)
    elif grouped and made.has_defaults:
        made.take("model.n_kv_heads", 1, words[1], note=f"1, the default of --{_GROUPS}")
    elif heads is not None and not grouped:
        if groups not in (None, heads):
            made.contradict(
                f"{made.words(words[0])} without --group-query-attention, as in Megatron-LM: each "
                "head has its own keys and values"
            )
        made.ignore(*words)
        made.take("model.n_kv_heads", heads, "num_attention_heads", note="all of them")


def _drop_experts(made: Translation) -> None:
    """Drop the words of experts of a file that has none."""
    index = made.known.index
    names = [
        name
        for name in made.settings
        if name.startswith("moe_") and name in index and index[name].ours.startswith("model.")
    ]
    if names:
        for name in names:
            made.drop(index[name].ours)
        made.contradict(f"{made.words(*names)} without --num-experts: there are no experts")
        made.ignore(*names)


def _is_gated(made: Translation) -> bool:
    flags = [made.flag(word) for word in ("swiglu", "gated_linear_unit", "quick_geglu")]
    return (
        any(flags)
        or "glu_activation" in made.settings
        or _activation(made) in made.known.own["gated"]
    )


def _activation(made: Translation) -> str:
    """Return the name of the activation, as ``silu`` of ``F.silu``."""
    found = made.settings.get("activation_func")
    value = found.value.text if found and isinstance(found.value, Unread) else found and found.value
    return str(value or "").lower().rpartition(".")[2]


def _gated_width(width: int, tp: int) -> int:
    """Return the width of a gated layer with as many parameters as a plain one of ``width``."""
    unit = lcm(64, tp)
    return max(unit, round(2 * width / 3 / unit) * unit)


def _set_width(made: Translation, tp: int, is_gated: bool) -> None:
    key, word = "model.ffn", "ffn_hidden_size"
    width, dim = made.number(word), made.value("model.dim")
    if width is not None and is_gated:
        made.take(key, width, word)
    elif width is not None:
        note = "two thirds: a gated layer then has about as many parameters"
        made.take(key, _gated_width(width, tp), word, note=note)
    elif dim is not None and is_gated:
        made.assume(key, max(64, int(8 * dim / 3 / 64) * 64), "8/3 of hidden_size, as theirs")
    elif dim is not None:
        note = "8/3 of hidden_size: as many parameters as theirs of 4 hidden_size"
        made.assume(key, _gated_width(4 * dim, tp), note)


def _set_vocabulary(made: Translation, tp: int) -> None:
    rows = made.number("padded_vocab_size")
    if rows is not None:
        made.take("model.vocab", rows, "padded_vocab_size")
        made.ignore("vocab_size", "make_vocab_size_divisible_by", "tokenizer_type")
        return
    unit = (made.number("make_vocab_size_divisible_by") or 128) * tp
    size, source = made.number("vocab_size"), "vocab_size"
    tokenizer = (made.text("tokenizer_type") or "").lower()
    vocabularies = made.known.own["vocabularies"]
    if size is None and tokenizer in vocabularies:
        size, source = vocabularies[tokenizer], "tokenizer_type"
    made.ignore("make_vocab_size_divisible_by", "tokenizer_type")
    if size is not None:
        vocab = padded(size, unit)
        if tokenizer in made.known.own["one_more"].split() and padded(size + 1, unit) != vocab:
            made.ask(
                f"versions before April 2026 have one token more, {padded(size + 1, unit):,} rows; "
                f"the recipe has {vocab:,}",
                "tokenizer_type",
                source,
                ours="model.vocab",
            )
        note = f"{size:,} padded to a multiple of {unit:,}" if vocab != size else ""
        made.take("model.vocab", vocab, source, note=note)
    elif made.model is None and tokenizer and "model.vocab" not in made.overridden:
        made.problems.append(
            f"{made.file}: {made.words('tokenizer_type')} does not tell the vocabulary; give it "
            "with --set model.vocab=N"
        )
    elif made.model is None:
        size = vocabularies[_GPT2_VOCAB]
        vocab = padded(size, unit)
        note = f"the vocabulary of GPT-2, {size:,}, padded to a multiple of {unit:,}"
        made.ask(f"no --vocab-size: the recipe has {note}", key="vocab_size", ours="model.vocab")
        made.assume("model.vocab", vocab, note)


def _kind_of_positions(made: Translation) -> str:
    kind = (made.text("position_embedding_type") or "learned_absolute").lower()
    return "rope" if kind == "rope" or made.flag("use_rotary_position_embeddings") else kind


def _set_positions(made: Translation) -> None:
    made.move("model.rope_theta", "rotary_base")
    if _kind_of_positions(made) == "rope" and made.model is None:
        made.assume("model.rope_theta", 10_000.0, "the default of --rotary-base")
    if made.flag("use_rope_scaling"):
        factor = made.real("rope_scaling_factor")
        words = ("use_rope_scaling", *(("rope_scaling_factor",) if factor is not None else ()))
        made.take("model.rope_factor", factor or 8.0, *words)
    made.ignore("rope_scaling_factor")
    word = "rotary_seq_len_interpolation_factor"
    factor = made.real(word)
    if factor not in (None, 1) and made.flag("use_rope_scaling"):
        made.ask("positions are stretched in one way", word, ours="model.rope_factor")
    elif factor not in (None, 1):
        made.take("model.rope_scaling", "linear", word)
        made.take("model.rope_factor", factor, word)
    made.ignore(word)
    _set_window(made)
    word = "untie_embeddings_and_output_weights"
    untied = made.flag(word)
    if word in made.settings:
        made.take("model.tied", not untied, word)
    elif made.model is None:
        made.assume("model.tied", True, "no --untie-embeddings-and-output-weights")


def _set_window(made: Translation) -> None:
    """Set the window of attention, and which layers have none."""
    window, word = made.get("window_size"), "window_attn_skip_freq"
    if window is None:
        made.ignore(word)
        return
    numbers = [int(text) for text in re.findall(r"-?[0-9]{1,9}", str(window.value))]
    if len(numbers) == 2 and numbers[0] >= 0 and numbers[1] <= 0:
        made.take("model.window", numbers[0] + 1, "window_size")
    else:
        made.ask(
            "only causal windows (w, 0) are there: attention sees all",
            "window_size",
            ours="model.window",
        )
    set_by_user = made.override("model.window")
    skips = made.get(word)
    if skips is None or not (made.value("model.window") if set_by_user is None else set_by_user):
        made.ignore(word)  # without a window, all layers see all
        return
    text = str(skips.value).lower()
    # The digits are counted first: Python refuses to parse thousands of them.
    every = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
    if 1 < every <= MOST_LAYERS:
        made.take("model.full_every", every, word)
    elif text not in ("0", "none"):
        made.ask(
            "a pattern of layers that see all, which model.full_every lacks",
            word,
            ours="model.full_every",
        )
    made.ignore(word)


def _note_other_layers(made: Translation, is_gated: bool) -> None:
    """Ask about layers of theirs that are not those of a Llama. What is absent has its default."""
    program = made.text("program") or ""
    if any(name in program.lower() for name in made.known.own["other_models"].split()):
        made.ask("the model is no decoder of text; the recipe is a Llama", "program")
    made.ignore("program")

    plain = [name for name in ("squared_relu", "openai_gelu") if made.flag(name)]
    units = ["quick_geglu", "glu_activation", "activation_func", "gated_linear_unit", "swiglu"]
    said = plain + [name for name in units if name in made.settings]
    is_ours = made.flag("swiglu") or (made.text("glu_activation") or "").lower() == "swiglu"
    is_ours = is_ours or _activation(made) in made.known.own["gated"]
    if (made.flag("quick_geglu") or not is_ours) and (said or made.has_defaults):
        width = "the width is theirs" if is_gated else "the width is two thirds of theirs"
        made.ask(f"no SwiGLU; the recipe has SwiGLU, and {width}", *(said or ["swiglu"]))
    made.ignore(*units)

    norm = (made.text("normalization") or "LayerNorm").lower()
    if norm != "rmsnorm" and _is_said(made, "normalization"):
        reason = "no RMSNorm" if "normalization" in made.settings else "LayerNorm, the default"
        made.ask(f"{reason}; the recipe has RMSNorm", "normalization")
    kind = _kind_of_positions(made)
    if kind != "rope" and _is_said(made, "position_embedding_type"):
        made.ask(f"{kind} positions; the recipe has rotary ones", "position_embedding_type")
    made.ignore("use_rotary_position_embeddings", "no_position_embedding", "normalization")
    made.ignore("position_embedding_type")

    has_no_biases = made.flag("disable_bias_linear")
    if "add_bias_linear" in made.settings:
        has_no_biases = has_no_biases or not made.flag("add_bias_linear")
    if not has_no_biases and _is_said(made, "disable_bias_linear", "add_bias_linear"):
        made.ask("linear layers with biases; the recipe has none", key="disable_bias_linear")
    made.ignore("disable_bias_linear", "add_bias_linear")
    for word in ("attention_dropout", "hidden_dropout"):
        rate = made.real(word)
        if (0.1 if rate is None else rate) and _is_said(made, word):
            made.ask(f"dropout{'' if rate else ' 0.1, the default'}; the recipe has none", word)
        made.ignore(word)


def _is_said(made: Translation, *words: str) -> bool:
    """Return whether the file says one of the words, or leaves it to a default of Megatron-LM."""
    return made.has_defaults or any(word in made.settings for word in words)


def _set_experts(made: Translation, tp: int, is_gated: bool) -> None:
    values = made.values
    width = made.number("moe_ffn_hidden_size")
    if width is not None:
        expert = width if is_gated or made.model else _gated_width(width, tp)
        made.take("model.expert_ffn", expert, "moe_ffn_hidden_size")
    if "model.shared_ffn" in values and not is_gated and made.model is None:
        value = values["model.shared_ffn"]
        values["model.shared_ffn"] = value._replace(value=_gated_width(value.value, tp))
    if made.model is None and "model.experts_per_token" not in values:
        made.assume("model.experts_per_token", 2, "the default of --moe-router-topk")

    balance = (made.text("moe_router_load_balancing_type") or "aux_loss").lower()
    coefficient = made.real("moe_aux_loss_coeff")
    if balance not in ("aux_loss", "seq_aux_loss", "none", "global_aux_loss"):
        made.ask("routing is by the best scores (top-k)", "moe_router_load_balancing_type")
    if coefficient is not None and balance != "none":
        made.take("model.balance_loss", coefficient, "moe_aux_loss_coeff")
        if balance != "seq_aux_loss":
            made.lose(
                "ours counts the load of each sequence, theirs that of a micro-batch "
                "(docs/experts.md)",
                "moe_router_load_balancing_type",
            )
    made.ignore("moe_aux_loss_coeff", "moe_router_load_balancing_type")

    chosen = made.value("model.experts_per_token", 2)
    is_softmax = made.value("model.router", "softmax") == "softmax"
    if made.flag("moe_router_pre_softmax") and is_softmax:
        made.take("model.renormalise", False, "moe_router_pre_softmax")
    elif chosen == 1:
        made.assume("model.renormalise", False, "one expert a token: its weight is its score")
    rate = made.real("moe_router_bias_update_rate")
    if rate is not None and made.value("model.router_bias"):
        made.take("model.bias_rate", rate, "moe_router_bias_update_rate")
    _set_layers_with_experts(made)


def _set_layers_with_experts(made: Translation) -> None:
    found = made.get("moe_layer_freq")
    if found is None:
        return
    text = re.sub(r"\s", "", str(found.value))
    pattern = _LAYER_PATTERN.fullmatch(text)
    if isinstance(found.value, list | tuple) and all(
        one in (0, 1) and type(one) is int for one in found.value
    ):
        zeros = list(found.value).index(1) if 1 in found.value else len(found.value)
        if all(found.value[zeros:]):
            made.take("model.dense_layers", zeros, "moe_layer_freq")
            return
    elif pattern:
        made.take("model.dense_layers", int(pattern[1] or 0), "moe_layer_freq")
        return
    elif text.isdecimal() and 0 < len(text) < 6 and int(text):
        made.take("model.moe_every", int(text), "moe_layer_freq")
        if int(text) > 1:
            made.ask(
                f"here blocks {text}, 2 x {text} and so on have experts, theirs 1, 1 + {text} "
                "and so on: as many, in other places",
                "moe_layer_freq",
            )
        return
    made.ask("a pattern that model.dense_layers and model.moe_every lack: all", "moe_layer_freq")


# --- precision and memory ---


def _set_precision(made: Translation) -> None:
    precision = read_dtype(made, "precision")
    switches = {"fp16": "float16", "bf16": "bfloat16"}
    dtypes = {word: dtype for word, dtype in switches.items() if made.flag(word)}
    set_dtype(made, {**dtypes, "precision": precision})
    if precision not in (None, "", "float16", "bfloat16", "float32"):
        made.ask("not known", "precision", ours="precision.compute")
    made.ignore("bf16", "fp16", "precision")
    if "fp8_format" in made.settings and str(made.settings["fp8_format"].value) != "None":
        made.take("precision.matmul", "float8", "fp8_format")


def _set_memory(made: Translation) -> None:
    granularity = made.text("recompute_granularity")
    method = (made.text("recompute_method") or "uniform").lower()
    count = made.number("recompute_num_layers")
    words = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    made.ignore(*words)
    key = "memory.activation_checkpoint"
    if granularity in ("selective", "full", "none"):
        made.take(key, granularity, *words)
        if granularity == "full" and method == "block" and count is not None:
            made.lose(
                f"theirs recomputes {count} layers of each stage, ours all; similar: "
                '--set memory.activation_checkpoint="every N blocks"',
                *words,
            )
        elif granularity == "full" and (count or 1) > 1:
            made.lose(f"theirs keeps the input of every {count}th layer, ours of each", *words)
    elif granularity is not None:
        made.lose('not one of selective and full: "none"', *words)
    elif made.flag("recompute_activations"):
        made.take(key, "selective", "recompute_activations")
    elif made.flag("checkpoint_activations"):
        made.take(key, "full", "checkpoint_activations")
    if made.value(key) == "selective":
        made.lose(
            "what is recomputed differs: theirs the scores of attention, ours all but attention "
            "and products (docs/recipes.md)",
            *words,
        )


# --- the optimizer and the run ---


def _set_optimizer(made: Translation) -> None:
    take_betas(made, ("adam_beta1", "adam_beta2"), (0.9, 0.999))
    name = (made.text("optimizer") or "adam").lower()
    if name in ("muon", "dist_muon"):
        _set_muon(made)
    elif name == "adam":
        made.ignore("optimizer")
    else:
        made.ask("the optimizer of the recipe is AdamW", "optimizer", ours="optim.name")


def _set_muon(made: Translation) -> None:
    """Set the keys of Muon, from ``megatron/core/optimizer/emerging_optimizers.py``."""
    made.take("optim.name", "muon", "optimizer")
    made.lose(
        "theirs has Muon for routers as well, and takes the two matrices into a gated layer for one"
    )
    made.move("optim.momentum", "muon_momentum")
    made.assume("optim.momentum", 0.9, "the default of --muon-momentum")
    made.move("optim.nesterov", "muon_nesterov")
    made.assume("optim.nesterov", False, "no --muon-nesterov")
    made.move("optim.newton_schulz_steps", "muon_num_ns_steps")
    word = "muon_coefficient_type"
    if (made.text(word) or "quintic") != "simple":
        made.ask(
            "other coefficients in each step of Newton-Schulz; the recipe has those of simple",
            word,
            ours="optim.newton_schulz",
        )
    made.ignore(word)

    # Theirs multiplies by sqrt(longer side), ours by 0.2 sqrt(longer side).
    word, scale_word = "muon_scale_mode", "muon_extra_scale_factor"
    mode = made.text(word) or "spectral"
    if mode not in ("spectral", "shape_scaling"):
        made.ask("not there: match_rms_adamw", word, ours="optim.lr_scale")
    is_original = mode == "shape_scaling"
    made.take("optim.lr_scale", "original" if is_original else "match_rms_adamw", word)
    extra = made.real(scale_word)
    factor = (1.0 if extra is None else extra) * (1.0 if is_original else 5.0)
    rate = made.value("optim.lr", OptimTable().lr)
    if factor != 1.0:
        made.take("optim.matrix_lr", factor * rate, scale_word, note=f"{factor:g} x {rate:g}")
        if made.value("optim.weight_decay"):
            made.ask(
                f"weight decay goes with the rate of a matrix, which is {factor:g} times theirs: "
                "give the matrices a weight_decay of their own in optim.groups",
                key="matrix_decay",
                ours="optim.groups",
            )


def _set_schedule(made: Translation) -> None:
    batch, length = made.value("data.global_batch", 1), made.value("data.seq_len", 1)
    steps = _steps(made, "train", batch, length)
    words = [word for word in _counts("train") if word in made.settings]
    if steps is not None:
        note = f"/ ({batch} x {length})" if words[0] == "train_tokens" else ""
        made.take("run.steps", max(1, steps), words[0], note=note)
    made.ignore(*words)

    made.take_choice("optim.schedule", "lr_decay_style")
    style = made.value("optim.schedule")
    decay = _steps(made, "lr_decay", batch, length)
    if style == "constant":
        made.drop("optim.min_lr")
        made.ignore(*_counts("lr_decay"))
    elif decay is not None:
        made.take("optim.decay", decay, *_counts("lr_decay"))
    _set_warmup(made, decay or steps, _steps(made, "lr_warmup", batch, length))
    if style == "wsd":
        _set_final_decay(made, _steps(made, "lr_wsd_decay", batch, length))
    made.ignore("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")


def _set_warmup(made: Translation, steps: int | None, warmup: int | None) -> None:
    """Set the warmup, which is a number of steps, or a part of the ``steps`` of the decay."""
    fraction = made.real("lr_warmup_fraction")
    if fraction is not None and steps:
        computed = round(fraction * steps)
        if warmup:
            made.contradict(
                f"{made.words(*_counts('lr_warmup'))} and "
                f"{made.words('lr_warmup_fraction')}: the fraction is used, {computed} steps"
            )
        made.take("optim.warmup", computed, "lr_warmup_fraction", note=f"of {steps} steps")
    elif warmup is not None:
        made.take("optim.warmup", warmup, *_counts("lr_warmup"))
    made.ignore(*_counts("lr_warmup"))


def _set_final_decay(made: Translation, steps: int | None) -> None:
    """Set the steps of the decay at the end of the schedule wsd."""
    if steps is not None:
        made.take("optim.decay_steps", steps, "lr_wsd_decay_iters", "lr_wsd_decay_samples")
    word = "lr_wsd_decay_style"
    shape = made.text(word)
    if shape is None:
        made.ask("the decay of wsd is linear, theirs by default exponential", key=word)
    elif shape != "linear":
        made.ask("the decay of wsd is linear", word)


def _counts(what: str) -> tuple[str, str, str]:
    """Return the words that give a number of steps: in steps, in samples, and in tokens."""
    return f"{what}_iters", f"{what}_samples", f"{what}_tokens"


def _steps(made: Translation, what: str, batch: int, length: int) -> int | None:
    """Return a number of steps, which may be given in samples or in tokens."""
    for word, unit in zip(_counts(what), (1, batch, batch * length), strict=True):
        count = made.real(word)
        if count is not None:
            return int(count) // max(1, unit)
    return None


def _set_run(made: Translation) -> None:
    interval, count = made.number("eval_interval"), made.number("eval_iters")
    if interval is not None:
        made.take("validation.every", 0 if count == 0 else interval, "eval_interval")
    if count == 0 or interval is None:
        made.drop("validation.steps")
    resets = made.flag("reset_attention_mask"), made.flag("reset_position_ids")
    if all(resets):
        made.take("data.packing", "documents", "reset_attention_mask", "reset_position_ids")
    elif any(resets):
        made.lose(
            "documents are separated in attention and positions at once; data.packing = none",
            "reset_attention_mask",
            "reset_position_ids",
        )
