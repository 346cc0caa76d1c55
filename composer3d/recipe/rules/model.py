"""Rules about the shape of the model alone."""

from collections.abc import Iterator
from typing import Any

from composer3d.models.registry import architecture
from composer3d.recipe.rules.rule import (
    Breach,
    KeyChange,
    Rule,
    breach,
    must_be_above,
    must_be_at_most,
    only_used_with,
    rule,
    use,
)
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import divisors, suggest


@rule("model.n_heads", "model.dim", "model.head_dim")
def heads_divide_dim(recipe: Recipe) -> Iterator[str]:
    """A head is dim / n_heads wide if head_dim is absent; RoPE needs a whole, even width."""
    dim, heads = recipe.model.dim, recipe.model.n_heads
    if recipe.model.head_dim is not None or dim % (2 * heads) == 0:
        return
    way_out = "use an even model.dim" if dim % 2 else suggest(divisors(dim // 2), heads)
    if dim % heads:
        yield f"<model.n_heads> must divide <model.dim>; {way_out}"
    else:
        yield (
            f"<model.n_heads> with <model.dim> makes heads {dim // heads} wide, but RoPE needs an "
            f"even width; {way_out}"
        )


@rule("model.n_kv_heads", "model.n_heads")
def kv_heads_divide_heads(recipe: Recipe) -> Iterator[str]:
    """Equally many query heads share each key-value head."""
    heads, kv_heads = recipe.model.n_heads, recipe.model.n_kv_heads
    if heads % kv_heads:
        way_out = suggest(divisors(heads), kv_heads)
        yield f"<model.n_kv_heads> must divide <model.n_heads>; {way_out}"


@rule("model.n_kv_heads", "model.n_heads", "model.kv_rank")
def latents_give_each_head_a_key(recipe: Recipe) -> Iterator[Breach]:
    """Latent attention makes a key and a value for each query head."""
    if recipe.model.n_kv_heads != recipe.model.n_heads:
        yield breach(
            "<model.n_kv_heads> must be <model.n_heads>: latent attention has a key for each head",
            use("model.n_kv_heads", recipe.model.n_heads),
        )


@rule("model.rope_dim", "model.value_dim", "model.n_heads", "model.dim", "model.head_dim")
def heads_hold_their_parts(recipe: Recipe) -> Iterator[str]:
    """A part of a head is rotated and a part is not; its value is at most as wide as its key."""
    model: Any = recipe.model
    # Another rule reports heads without a width.
    if model.head_dim is None and model.dim % (2 * model.n_heads):
        return
    width = model.head_width
    if model.rope_dim >= width:
        yield f"<model.rope_dim> must be below {width}, the width of a head; raise model.head_dim"
    if model.value_dim > width:
        yield (
            f"<model.value_dim> must be at most {width}, the width of a head; raise model.head_dim"
        )


@rule("model.expert_groups", "model.experts")
def groups_divide_experts(recipe: Recipe) -> Iterator[str]:
    """All groups have equally many experts."""
    model: Any = recipe.model
    if model.experts % model.expert_groups:
        way_out = suggest(divisors(model.experts), model.expert_groups)
        yield f"<model.expert_groups> must divide <model.experts>; {way_out}"


@rule("model.experts_per_token", "model.experts")
def a_token_has_no_more_experts_than_there_are(recipe: Recipe) -> Iterator[str]:
    """A token chooses different experts."""
    if 0 < recipe.model.experts < recipe.model.experts_per_token:
        yield "<model.experts_per_token> must be at most <model.experts>"


@rule("model.experts_per_token", "model.experts", "model.expert_groups", "model.groups_per_token")
def tokens_find_experts(recipe: Recipe) -> Iterator[str]:
    """The groups that a token chooses hold at least as many experts as it uses."""
    model: Any = recipe.model
    groups, chosen = model.expert_groups, model.groups_per_token
    # Other rules report these.
    if model.experts % groups or chosen > groups or model.experts_per_token > model.experts:
        return
    group_size = model.experts // groups
    if model.experts_per_token > chosen * group_size:
        yield (
            f"<model.experts_per_token> must be at most {chosen * group_size}: a token chooses "
            f"<model.groups_per_token> of <model.expert_groups>, each with {group_size} experts"
        )


@rule("model.dense_layers", "model.moe_every", "model.n_layers")
def some_layer_has_experts(recipe: Recipe) -> Iterator[str]:
    """At least one block of a "moe" model has experts."""
    model: Any = recipe.model
    if model.moe_layers == 0:
        yield (
            "<model.dense_layers> and <model.moe_every> leave no block with experts among "
            "<model.n_layers>; use a smaller model.dense_layers or model.moe_every, or "
            'model.architecture = "llama"'
        )


@rule("model.shared_gate", "model.shared_ffn")
def gate_needs_a_shared_expert(recipe: Recipe) -> Iterator[Breach]:
    """A gate weighs the output of the shared expert."""
    model: Any = recipe.model
    if model.shared_gate and not model.shared_ffn:
        yield breach(
            "<model.shared_gate> has no expert to weigh with <model.shared_ffn>",
            use("model.shared_gate", False),
            "a width of the shared expert",
        )


@rule("model.renormalise", "model.experts_per_token")
def routers_learn(recipe: Recipe) -> Iterator[Breach]:
    """The only weight of a token, divided by itself, is 1 whatever the router computes."""
    model: Any = recipe.model
    if model.renormalise and model.experts_per_token == 1:
        yield breach(
            "<model.renormalise> with <model.experts_per_token> makes every weight 1, so that the "
            "loss teaches the router nothing",
            use("model.renormalise", False),
        )


@rule("model.experts_per_token", "model.gate_limit")
def routers_of_gpt_oss_learn(recipe: Recipe) -> Iterator[Breach]:
    """The same for gpt-oss, whose weights of a token always add up to 1."""
    model: Any = recipe.model
    if model.experts_per_token == 1:
        yield breach(
            "<model.experts_per_token> makes every weight 1, so that the loss teaches the router "
            "nothing",
            use("model.experts_per_token", 2),
        )


@rule("model.bias_rate", "model.router_bias")
def bias_rate_needs_a_bias(recipe: Recipe) -> Iterator[Breach]:
    """A router without a bias moves none."""
    model: Any = recipe.model
    default = type(model).__dataclass_fields__["bias_rate"].default
    if model.bias_rate != default and not model.router_bias:
        yield breach(
            "<model.bias_rate> is not used with <model.router_bias>",
            KeyChange("model.bias_rate", (default,), "remove it"),
            use("model.router_bias", True),
        )


@rule("model.mtp_loss", "model.mtp_layers")
def mtp_loss_needs_depths(recipe: Recipe) -> Iterator[Breach]:
    """Without depths of multi-token prediction, there is no loss that it weighs."""
    model: Any = recipe.model
    field = type(model).__dataclass_fields__.get("mtp_loss")  # other shapes have no such key
    if field is not None and model.mtp_loss != field.default and not model.mtp_layers:
        yield breach(
            "<model.mtp_loss> is not used with <model.mtp_layers>",
            KeyChange("model.mtp_loss", (field.default,), "remove it"),
            use("model.mtp_layers", 1),
        )


@rule("data.seq_len", "model.mtp_layers")
def depths_have_labels(recipe: Recipe) -> Iterator[Breach]:
    """The last depth predicts a token of the same sample: else nothing would train it."""
    depths = recipe.model.mtp_layers
    if depths >= recipe.data.seq_len:
        yield breach(
            "<data.seq_len> must be above <model.mtp_layers>, as each depth predicts a token more",
            use("data.seq_len", depths + 1),
            use("model.mtp_layers", 0),
        )


@rule(
    "model.rope_theta",
    "model.rope_scaling",
    "model.rope_context",
    "model.rope_beta_fast",
    "model.rope_beta_slow",
    "model.head_dim",
    "model.dim",
    "model.n_heads",
)
def yarn_orders_the_pairs(recipe: Recipe) -> Iterator[str]:
    """YaRN keeps the speed of the first pairs of a head, and slows down the last ones."""
    model: Any = recipe.model
    # Other rules report such bounds, and such heads.
    if model.rope_beta_slow > model.rope_beta_fast or model.head_width < 2:
        return
    if model.rope_scaling == "yarn" and model.yarn_ramp is None:
        yield (
            "<model.rope_theta> with <model.rope_context> leaves <model.rope_scaling> no pair to "
            "stretch from; use a larger model.rope_theta, and a model.rope_context of at least 7 "
            "times model.rope_beta_slow"
        )


@rule("model.rope_score_mscale", "model.rope_scaling")
def score_scale_needs_yarn(recipe: Recipe) -> Iterator[Breach]:
    """Other ways to stretch positions do not change scores."""
    model: Any = recipe.model
    if model.rope_score_mscale and model.rope_scaling != "yarn":
        yield breach(
            "<model.rope_score_mscale> is not used with <model.rope_scaling>",
            KeyChange("model.rope_score_mscale", (0.0,), "remove it"),
            use("model.rope_scaling", "yarn"),
        )


@rule("data.seq_len", "model.rope_scaling", "model.rope_factor", "model.rope_context")
def dynamic_positions_are_not_stretched(recipe: Recipe) -> Iterator[Breach]:
    """Angles that depend on the length of the sequence are not there."""
    model: Any = recipe.model
    if model.most_tokens is not None and recipe.data.seq_len > model.most_tokens:
        yield breach(
            "<data.seq_len> must be at most <model.rope_context>, because <model.rope_scaling> "
            "would stretch longer sequences by their length",
            use("data.seq_len", model.rope_context),
            use("model.rope_scaling", "yarn"),
        )


@rule("model.full_every", "model.window")
def full_blocks_need_a_window(recipe: Recipe) -> Iterator[Breach]:
    """Blocks without a window differ from the others only if those have one."""
    model: Any = recipe.model
    if model.full_every > 0 and model.window == 0:
        yield breach(
            "<model.full_every> is not used with <model.window>",
            use("model.full_every", 0),
            "model.window above 0",
        )
    elif model.full_every == 1:
        yield breach(
            "<model.full_every> lets every block see all tokens, so that <model.window> is not "
            "used",
            use("model.window", 0),
            "model.full_every of 2 or more",
        )


# What gives the shape, beside the recipe's own keys.
_SOURCE = ("model.architecture", "model.preset")


def _is_given(recipe: Recipe, name: str) -> bool:
    """Return whether a recipe itself gives a field of the shape, and no preset or config.json.

    A shape that is taken from elsewhere may have values that do nothing: a recipe with the first
    three blocks of SmolLM3 keeps its period of four.
    """
    model = recipe.model
    if model.hf is not None:
        return False
    row = architecture(model.architecture).presets.get(model.preset or "")
    return row is None or getattr(model, name) != getattr(row, name)


def _period_chooses_a_block(name: str) -> Rule:
    """Return the rule that every N-th block is one of the model, for the field ``name``."""

    @rule(f"model.{name}", "model.n_layers", *_SOURCE)
    def check(recipe: Recipe) -> Iterator[Breach]:
        layers = recipe.model.n_layers
        if getattr(recipe.model, name) > layers and _is_given(recipe, name):
            yield breach(
                f"<model.{name}> chooses no block: it is above <model.n_layers>",
                use(f"model.{name}", 0),
                f"a model.{name} of at most {layers}",
            )

    return check


@rule("model.rope_local_theta", "model.window", *_SOURCE)
def local_theta_needs_a_window(recipe: Recipe) -> Iterator[Breach]:
    """Blocks without a window have the other base."""
    model: Any = recipe.model
    default = type(model).__dataclass_fields__["rope_local_theta"].default
    is_default = model.rope_local_theta == default
    if model.window == 0 and not is_default and _is_given(recipe, "rope_local_theta"):
        yield breach(
            "<model.rope_local_theta> is not used with <model.window>",
            KeyChange("model.rope_local_theta", (default,), "remove it"),
            "model.window above 0",
        )


@rule("model.group_best", "model.expert_groups", *_SOURCE)
def one_group_is_not_chosen(recipe: Recipe) -> Iterator[Breach]:
    """Every token has the only group, whatever its scores."""
    model: Any = recipe.model
    default = type(model).__dataclass_fields__["group_best"].default
    is_default = model.group_best == default
    if model.expert_groups == 1 and not is_default and _is_given(recipe, "group_best"):
        yield breach(
            "<model.group_best> is not used with <model.expert_groups>",
            KeyChange("model.group_best", (default,), "remove it"),
            "model.expert_groups above 1",
        )


RULES: tuple[Rule, ...] = (
    heads_divide_dim,
    kv_heads_divide_heads,
    latents_give_each_head_a_key,
    heads_hold_their_parts,
    groups_divide_experts,
    must_be_at_most("model.groups_per_token", "model.expert_groups"),
    a_token_has_no_more_experts_than_there_are,
    tokens_find_experts,
    some_layer_has_experts,
    gate_needs_a_shared_expert,
    routers_learn,
    routers_of_gpt_oss_learn,
    bias_rate_needs_a_bias,
    mtp_loss_needs_depths,
    depths_have_labels,
    only_used_with("model.rope_low_freq", "model.rope_scaling", ["llama3"]),
    only_used_with("model.rope_high_freq", "model.rope_scaling", ["llama3"]),
    only_used_with("model.rope_context", "model.rope_scaling", ["llama3", "dynamic", "yarn"]),
    only_used_with("model.rope_beta_fast", "model.rope_scaling", ["yarn"]),
    only_used_with("model.rope_beta_slow", "model.rope_scaling", ["yarn"]),
    only_used_with("model.rope_truncate", "model.rope_scaling", ["yarn"]),
    only_used_with("model.rope_attention_factor", "model.rope_scaling", ["yarn"]),
    score_scale_needs_yarn,
    must_be_above("model.rope_high_freq", "model.rope_low_freq"),
    must_be_at_most("model.rope_beta_slow", "model.rope_beta_fast"),
    yarn_orders_the_pairs,
    dynamic_positions_are_not_stretched,
    full_blocks_need_a_window,
    _period_chooses_a_block("full_every"),
    _period_chooses_a_block("nope_every"),
    local_theta_needs_a_window,
    one_group_is_not_chosen,
)
