"""Rules about the layout: the mesh, the parallelisms, the batch, and the precision."""

from collections.abc import Iterator
from math import gcd, lcm
from typing import Any

from composer3d.facts.schedules import (
    SCHEDULES,
    micro_batch_requirement,
    nearest_micro_batches,
)
from composer3d.recipe.rules.rule import Breach, Rule, breach, needed_with, remove, rule, use
from composer3d.recipe.schema import AXES, FLOAT8_MULTIPLE, MOST_RANKS, Recipe
from composer3d.recipe.stages import n_stages_of
from composer3d.recipe.values import (
    as_toml,
    divisors,
    join_with_or,
    nearest_multiples,
    suggest,
    value_of,
)

# --- tensor parallelism ---


@rule("mesh.tp", "model.n_heads")
def tp_divides_heads(recipe: Recipe) -> Iterator[str]:
    """All ranks of tp hold equally many query heads."""
    if recipe.model.n_heads % recipe.mesh.tp:
        yield f"<mesh.tp> must divide <model.n_heads>; {_suggest_tp(recipe)}"


@rule("mesh.tp", "model.n_kv_heads", "model.n_heads", "model.ffn")
def tp_fits_kv_heads(recipe: Recipe) -> Iterator[str]:
    """All ranks hold equally many key-value heads, or equally many ranks share each of them."""
    if not _fits_kv_heads(recipe.mesh.tp, recipe.model.n_kv_heads):
        yield (
            f"<mesh.tp> and <model.n_kv_heads>: one must divide the other; {_suggest_tp(recipe)}"
        )


@rule("mesh.tp", "model.ffn")
def tp_divides_ffn(recipe: Recipe) -> Iterator[str]:
    """All ranks of tp hold equal parts of the width of a feed-forward layer."""
    if recipe.model.ffn % recipe.mesh.tp:
        yield f"<mesh.tp> must divide <model.ffn>; {_suggest_tp(recipe)}"


def _suggest_tp(recipe: Recipe) -> str:
    """Suggest values of tp that fit the heads, the key-value heads and the feed-forward layers.

    It must accept sizes outside of their ranges: not every rule that calls it declares all of these
    keys.
    """
    model = recipe.model
    shared_ffn = getattr(model, "shared_ffn", 0)  # gcd(x, 0) is x
    widest = gcd(model.n_heads, model.ffn, shared_ffn)
    legal = [tp for tp in divisors(widest) if _fits_kv_heads(tp, model.n_kv_heads)]
    return suggest(legal, recipe.mesh.tp)


def _fits_kv_heads(tp: int, kv_heads: int) -> bool:
    """Return whether one of the two numbers divides the other."""
    # The first test is true for 0 key-value heads, so that the second never divides by 0.
    return kv_heads % tp == 0 or tp % kv_heads == 0


@rule("mesh.tp", "model.vocab")
def every_tp_rank_has_vocabulary(recipe: Recipe) -> Iterator[str]:
    """Every tp rank holds at least one row of the vocabulary."""
    vocab, tp = recipe.model.vocab, recipe.mesh.tp
    chunk = -(-vocab // tp)
    if chunk * (tp - 1) >= vocab:
        yield (
            f"<mesh.tp> cuts <model.vocab> into {-(-vocab // chunk)} chunks of {chunk}, too few "
            f"for all ranks; use a smaller mesh.tp, or model.vocab = {chunk * tp}"
        )


@rule("mesh.tp", "model.vocab", "model.dim", "mesh.dp_shard", "mesh.cp", "parallel.zero")
def uneven_vocabulary_has_even_columns(recipe: Recipe) -> Iterator[str]:
    """If tp cuts the vocabulary unevenly, FSDP must be able to shard its columns evenly."""
    model, mesh = recipe.model, recipe.mesh
    is_uneven = model.vocab % mesh.tp and model.dim % (mesh.dp_shard * mesh.cp)
    if is_uneven and recipe.parallel.zero:
        even_vocab = -(-model.vocab // mesh.tp) * mesh.tp
        yield (
            "<mesh.tp> does not divide <model.vocab>, so <model.dim> must be a multiple of "
            "<mesh.dp_shard> x <mesh.cp>, the number of shards; change one of them, or use "
            f"model.vocab = {even_vocab}"
        )


# --- context parallelism ---


@rule("mesh.cp", "parallel.cp_method", "model.n_heads", "model.n_kv_heads", "mesh.tp")
def ulysses_shards_heads(recipe: Recipe) -> Iterator[str]:
    """Ulysses shards the heads of each tp rank over cp, so cp must divide them."""
    model, cp, tp = recipe.model, recipe.mesh.cp, recipe.mesh.tp
    heads, kv_heads = model.n_heads // tp, max(1, model.n_kv_heads // tp)
    if recipe.parallel.cp_method != "ulysses" or (heads % cp == 0 and kv_heads % cp == 0):
        return
    if tp == 1:
        fault = "must divide <model.n_heads> and <model.n_kv_heads>"
    else:
        fault = (
            f"must divide {heads} and {kv_heads}, the heads and key-value heads of each rank: "
            "<model.n_heads> and <model.n_kv_heads> over <mesh.tp>"
        )
    way_out = f'{suggest(divisors(gcd(heads, kv_heads)), cp)}, or parallel.cp_method = "ring"'
    yield f"<mesh.cp> with <parallel.cp_method> {fault}; {way_out}"


@rule("data.seq_len", "mesh.tp", "mesh.cp", "parallel.sequence_parallel", "parallel.cp_balance")
def sequence_divides(recipe: Recipe) -> Iterator[str]:
    """Each sequence must divide into equal chunks, one or two for each cp rank.

    With sequence parallelism, the tokens of a cp rank must also divide over tp.
    """
    seq_len, cp = recipe.data.seq_len, recipe.mesh.cp
    tp = recipe.mesh.tp if recipe.parallel.sequence_parallel else 1
    unit = cp * lcm(recipe.sequence_chunks // cp, tp)
    if seq_len % unit == 0:
        return

    multiples = nearest_multiples(seq_len, unit)
    cuts_by_tp = "<mesh.tp> with <parallel.sequence_parallel>"
    if cp == 1:
        yield (
            f"<data.seq_len> must be a multiple of {cuts_by_tp}; use {multiples}, or "
            "parallel.sequence_parallel = false"
        )
        return
    reason = f"<mesh.cp> cuts it into {recipe.sequence_chunks} chunks"
    if tp > 1:
        reason += f", and {cuts_by_tp} cuts the part of each rank again"
    yield f"<data.seq_len> must be a multiple of {unit}: {reason}; use {multiples}"


# --- expert parallelism ---


@rule("mesh.ep", "mesh.dp_shard", "mesh.cp", "mesh.tp")
def ep_divides_ranks(recipe: Recipe) -> Iterator[str]:
    """ep groups the ranks of dp_shard, cp and tp; it adds none."""
    mesh = recipe.mesh
    ranks = mesh.dp_shard * mesh.cp * mesh.tp
    if ranks % mesh.ep:
        yield (
            "<mesh.ep> must divide <mesh.dp_shard> x <mesh.cp> x <mesh.tp>, which is "
            f"{ranks}; {_suggest_ep(recipe)}"
        )


@rule("mesh.ep", "model.architecture")
def ep_needs_experts(recipe: Recipe) -> Iterator[Breach]:
    """Only a model with experts can share them between ranks."""
    if recipe.mesh.ep > 1 and not recipe.model.experts:
        yield breach(
            "<mesh.ep> shares experts between ranks, but a model of <model.architecture> has none",
            use("mesh.ep", 1),
            use("model.architecture", "moe"),
        )


@rule("mesh.ep", "model.experts")
def ep_divides_experts(recipe: Recipe) -> Iterator[str]:
    """Every rank of ep holds equally many experts."""
    if recipe.model.experts % recipe.mesh.ep:
        yield f"<mesh.ep> must divide <model.experts>; {_suggest_ep(recipe)}"


def _suggest_ep(recipe: Recipe) -> str:
    """Suggest values of ep that divide the ranks and the experts.

    It must accept ``mesh.dp_shard = -1``, and sizes outside of their ranges.
    """
    mesh, experts = recipe.mesh, recipe.model.experts
    ranks = 0 if mesh.dp_shard == -1 else mesh.dp_shard * mesh.cp * mesh.tp  # gcd(x, 0) is x
    return suggest(divisors(gcd(ranks, experts or 1)), mesh.ep)


@rule("parallel.sequence_parallel", "mesh.tp")
def experts_need_sequence_parallel(recipe: Recipe) -> Iterator[Breach]:
    """Without sequence parallelism, all tp ranks would send the same tokens to experts."""
    tp = recipe.mesh.tp
    if recipe.model.experts and tp > 1 and not recipe.parallel.sequence_parallel:
        yield breach(
            "<parallel.sequence_parallel> with <mesh.tp> leaves all tokens on every tp rank, so "
            f"experts would compute each token {tp} times",
            use("parallel.sequence_parallel", True),
            use("mesh.tp", 1),
        )


@rule(
    "mesh.ep", "mesh.dp_shard", "mesh.cp", "mesh.tp", "parallel.zero", "model.dim", "model.experts"
)
def experts_are_sharded_evenly(recipe: Recipe) -> Iterator[str]:
    """FSDP shards the rows of each expert over (dp_shard x cp x tp) / ep ranks."""
    model, mesh = recipe.model, recipe.mesh
    ranks = mesh.dp_shard * mesh.cp * mesh.tp
    # Another rule reports an ep that does not divide the ranks.
    if not model.experts or not recipe.parallel.zero or ranks % mesh.ep:
        return

    def is_even(ep: int) -> bool:
        shards = ranks // ep
        return model.dim % shards == 0 and model.expert_width % shards == 0

    if not is_even(mesh.ep):
        legal = [ep for ep in divisors(gcd(ranks, model.experts)) if is_even(ep)]
        way_out = suggest(legal, mesh.ep) if legal else "use other sizes of the mesh"
        yield (
            f"<mesh.ep> leaves {mesh.efsdp} ranks of <mesh.dp_shard> x <mesh.cp> x <mesh.tp> to "
            "shard each expert: they must divide <model.dim> and "
            f"{model.expert_width}, the width of an expert; {way_out}"
        )


@rule("mesh.tp", "model.shared_ffn")
def tp_divides_shared_ffn(recipe: Recipe) -> Iterator[str]:
    """All ranks of tp hold equal parts of the width of the shared expert."""
    if value_of(recipe, "model.shared_ffn") % recipe.mesh.tp:
        yield f"<mesh.tp> must divide <model.shared_ffn>; {_suggest_tp(recipe)}"


# --- the world ---


@rule(*(f"mesh.{axis}" for axis in AXES))
def world_can_be_started(recipe: Recipe) -> Iterator[str]:
    """A world has at most ``MOST_RANKS`` processes."""
    if recipe.world_size > MOST_RANKS:
        axes = " x ".join(f"<mesh.{axis}>" for axis in AXES)
        yield (
            f"{axes} is a world of {recipe.world_size:_} processes; it must be at most "
            f"{MOST_RANKS:_}"
        )


# --- pipeline parallelism ---


@rule("mesh.pp", "parallel.virtual_stages", "parallel.schedule", "model.n_layers")
def stages_have_layers(recipe: Recipe) -> Iterator[str]:
    """Every pipeline stage holds at least one layer."""
    pp, layers = recipe.mesh.pp, recipe.model.n_layers
    per_rank = recipe.parallel.stages_per_rank
    if pp == 1 or pp * per_rank <= layers:
        return
    if layers >= per_rank:
        way_out = f"use at most {layers // per_rank}"
    else:
        way_out = "use more layers or fewer parallel.virtual_stages"
    if per_rank == 1:
        fault = "<mesh.pp> must be at most <model.n_layers>"
    else:
        fault = (
            f"<mesh.pp> with {per_rank} stages per rank makes {pp * per_rank} stages, but "
            "<model.n_layers>"
        )
    yield f"{fault}: every stage needs a layer; {way_out}"


@rule("parallel.virtual_stages", "parallel.schedule")
def schedule_accepts_virtual_stages(recipe: Recipe) -> Iterator[str]:
    """The schedule allows this number of stages on each rank."""
    stages = SCHEDULES[recipe.parallel.schedule].stages
    least, most = stages.least_per_rank, stages.most_per_rank
    virtual_stages = recipe.parallel.virtual_stages
    if virtual_stages is not None and not least <= virtual_stages <= most:
        need = f"{least}" if least == most else f"{least} or more"
        yield (
            f"<parallel.virtual_stages> does not fit <parallel.schedule>, which needs {need}; "
            f"use {need}, or remove it"
        )


@rule(
    "parallel.stages", "mesh.pp", "parallel.virtual_stages", "parallel.schedule", "model.n_layers"
)
def explicit_stages_fit(recipe: Recipe) -> Iterator[str]:
    """``parallel.stages`` gives every stage at least one layer, and assigns all layers."""
    stages, pp = recipe.parallel.stages, recipe.mesh.pp
    if stages is None:
        return
    per_rank = recipe.parallel.stages_per_rank if pp > 1 else 1
    count = pp * per_rank
    if len(stages) != count:
        yield (
            f"<parallel.stages> has {len(stages)} stages, but <mesh.pp> with {per_rank} per rank "
            f"makes {count}; use {count} numbers, or remove it"
        )
    elif min(stages) < 1:
        yield "<parallel.stages> must give every stage at least 1 layer"
    elif sum(stages) != recipe.model.n_layers:
        yield (
            f"<parallel.stages> has {sum(stages)} layers in total, but <model.n_layers>; "
            "the two must be equal"
        )


# --- the batch ---

_BATCH_KEYS = ("data.micro_batch", "mesh.dp_replicate", "mesh.dp_shard")
_BATCH_PRODUCT = " x ".join(f"<{key}>" for key in _BATCH_KEYS)


@rule("data.global_batch", *_BATCH_KEYS)
def batch_divides(recipe: Recipe) -> Iterator[str]:
    """The global batch is a whole number of micro-batches on every rank."""
    batch = recipe.data.global_batch
    unit = recipe.data.micro_batch * recipe.mesh.batch_ranks
    if batch % unit:
        yield (
            f"<data.global_batch> must be a multiple of {_BATCH_PRODUCT}, which is {unit}; "
            f"use {nearest_multiples(batch, unit)}"
        )


@rule("data.global_batch", *_BATCH_KEYS, "parallel.schedule", "mesh.pp")
def schedule_accepts_micro_batches(recipe: Recipe) -> Iterator[str]:
    """The schedule can run this number of micro-batches."""
    pp, schedule = recipe.mesh.pp, recipe.parallel.schedule
    unit = recipe.data.micro_batch * recipe.mesh.batch_ranks
    count, remainder = divmod(recipe.data.global_batch, unit)
    if pp == 1 or remainder:
        return
    requirement = micro_batch_requirement(schedule, count, pp, "<mesh.pp>")
    if requirement is None:
        return
    legal = nearest_micro_batches(schedule, count, pp)
    way_out = f"use data.global_batch = {join_with_or(unit * number for number in legal)}"
    if legal[0] > count:
        way_out += ', or parallel.schedule = "GPipe", which accepts fewer'
    noun = "micro-batch" if count == 1 else "micro-batches"
    yield (
        f"<data.global_batch> over {_BATCH_PRODUCT} gives a rank {count} {noun}, but "
        f"<parallel.schedule> needs {requirement}; {way_out}"
    )


# --- sharding, precision, compilation ---


@rule("parallel.zero", "mesh.dp_shard", "mesh.dp_replicate")
def zero_0_does_not_shard(recipe: Recipe) -> Iterator[Breach]:
    """With parallel.zero = 0, all ranks hold whole parameters, so dp_shard must be 1."""
    if recipe.parallel.zero == 0 and recipe.mesh.dp_shard > 1:
        yield breach(
            "<parallel.zero> keeps whole parameters, but <mesh.dp_shard> shards them",
            f"use mesh.dp_shard = 1 with mesh.dp_replicate = {recipe.mesh.batch_ranks}",
            use("parallel.zero", 1, 3),
        )


@rule("parallel.zero", "mesh.pp")
def pipeline_reduces_once(recipe: Recipe) -> Iterator[Breach]:
    """With pp, gradients stay whole until the last micro-batch, which zero = 2 contradicts."""
    if recipe.parallel.zero == 2 and recipe.mesh.pp > 1:
        yield breach(
            "<parallel.zero> reduces gradients after each micro-batch, but with <mesh.pp> they "
            "stay whole until the last one",
            use("parallel.zero", 1, 3),
        )


@rule("precision.compute", "precision.params")
def compute_fits_params(recipe: Recipe) -> Iterator[str]:
    """The compute dtype must be that of the parameters, or bfloat16 with float32 parameters."""
    params = recipe.precision.params
    legal = ("float32", "bfloat16") if params == "float32" else (params,)
    if recipe.precision.computes_in not in legal:
        yield (
            "<precision.compute> does not fit <precision.params>; use "
            f"{join_with_or(map(as_toml, legal))}"
        )


@rule("precision.reduce", "precision.params")
def reduce_fits_params(recipe: Recipe) -> Iterator[Breach]:
    """Gradients are sent in the dtype of the parameters, or in bfloat16 instead of float32."""
    params = recipe.precision.params
    if params != "float32" and recipe.precision.reduces_in != params:
        yield breach(
            "<precision.reduce> does not fit <precision.params>", remove("precision.reduce")
        )


@rule("precision.reduce", "parallel.zero", "mesh.dp_shard", "mesh.cp")
def narrow_gradients_are_sharded(recipe: Recipe) -> Iterator[Breach]:
    """Only what shards sum can be sent narrow: FSDP's all-reduce would also add up in bfloat16."""
    if recipe.precision.reduces_in != "bfloat16":
        return
    if recipe.parallel.zero == 0:
        yield breach(
            "<precision.reduce> is for gradients that are summed over shards, but <parallel.zero> "
            "all-reduces whole ones",
            use("parallel.zero", 1, 3),
            remove("precision.reduce"),
        )
    elif recipe.mesh.dp_shard * recipe.mesh.cp == 1:
        yield breach(
            "<precision.reduce> is for gradients that are summed over shards, but <mesh.dp_shard> "
            "x <mesh.cp> makes no shards",
            "use a larger mesh.dp_shard",
            remove("precision.reduce"),
        )


@rule("precision.reduce")
def gradients_of_experts_are_wide(recipe: Recipe) -> Iterator[Breach]:
    """FSDP takes no reduce-scatter of ours for a unit with two meshes, such as a block's."""
    if recipe.precision.reduces_in == "bfloat16" and recipe.model.experts:
        yield breach(
            "<precision.reduce> does not work for a model with experts, whose gradients are summed "
            "over other ranks than those of the rest of their block",
            remove("precision.reduce"),
        )


@rule("precision.matmul", "precision.compute", "precision.params")
def float8_computes_in_bfloat16(recipe: Recipe) -> Iterator[Breach]:
    """Kernels return bfloat16. In float64 the products are emulated, for proofs."""
    computes_in = recipe.precision.computes_in
    if recipe.precision.matmul == "float8" and computes_in not in ("bfloat16", "float64"):
        yield breach(
            "<precision.matmul> needs forward and backward in bfloat16, but they are in "
            f"{computes_in}",
            use("precision.compute", "bfloat16"),
            use("precision.matmul", "compute"),
        )


@rule(
    "precision.matmul",
    "precision.compute",
    "precision.params",
    "mesh.tp",
    "model.dim",
    "model.n_heads",
    "model.n_kv_heads",
    "model.head_dim",
    "model.ffn",
)
def float8_has_sizes_of_kernels(recipe: Recipe) -> Iterator[Breach]:
    """Kernels take products whose sizes on each rank are multiples of 16."""
    precision, model, tp = recipe.precision, recipe.model, recipe.mesh.tp
    if precision.matmul != "float8" or precision.computes_in != "bfloat16":
        return
    width = model.head_width
    kv_cuts = min(tp, model.n_kv_heads)  # with fewer heads than ranks, a rank computes one
    sizes = [
        (model.dim, 1, "<model.dim>"),
        (model.n_heads * width, tp, f"<model.n_heads> of width {width} over <mesh.tp>"),
        (model.n_kv_heads * width, kv_cuts, f"<model.n_kv_heads> of width {width} over <mesh.tp>"),
    ]
    if getattr(model, "moe_layers", 0) < model.n_layers:  # otherwise, no block has a dense layer
        sizes.append((model.ffn, tp, "<model.ffn> over <mesh.tp>"))
    elif "expert_ffn" not in type(model).__dataclass_fields__:
        sizes.append((model.ffn, 1, "<model.ffn>"))  # the width of experts, which tp does not cut
    for rows, cuts, keys in sizes:
        # Other rules report a tp that does not divide the heads or the feed-forward layers.
        if rows % cuts == 0 and rows // cuts % FLOAT8_MULTIPLE:
            yield breach(
                "<precision.matmul> needs products whose sizes are multiples of "
                f"{FLOAT8_MULTIPLE}, but {keys} makes {rows // cuts}",
                "change these keys",
                use("precision.matmul", "compute"),
            )


@rule(
    "precision.matmul",
    "precision.compute",
    "precision.params",
    "mesh.tp",
    "model.ffn",
    "model.expert_ffn",
    "model.shared_ffn",
)
def float8_has_sizes_of_experts(recipe: Recipe) -> Iterator[Breach]:
    """The same for experts, which tp does not cut, and for a shared expert, which it does."""
    precision, model, tp = recipe.precision, recipe.model, recipe.mesh.tp
    if precision.matmul != "float8" or precision.computes_in != "bfloat16" or not model.experts:
        return
    widths = [(model.expert_width, "the width of an expert is")]
    shared_width = value_of(recipe, "model.shared_ffn")
    if shared_width % tp == 0:
        widths.append((shared_width // tp, "<model.shared_ffn> over <mesh.tp> makes"))
    for width, words in widths:
        if width % FLOAT8_MULTIPLE:
            yield breach(
                "<precision.matmul> needs products whose sizes are multiples of "
                f"{FLOAT8_MULTIPLE}, but {words} {width}",
                "use another model.expert_ffn or model.shared_ffn",
                use("precision.matmul", "compute"),
            )


@rule(
    "precision.matmul",
    "precision.compute",
    "precision.params",
    "mesh.tp",
    "model.dim",
    "model.n_heads",
    "model.head_dim",
    "model.query_rank",
    "model.kv_rank",
    "model.rope_dim",
    "model.value_dim",
)
def float8_has_sizes_of_latents(recipe: Recipe) -> Iterator[Breach]:
    """The same for the projections of latent attention."""
    precision, tp = recipe.precision, recipe.mesh.tp
    model: Any = recipe.model
    if precision.matmul != "float8" or precision.computes_in != "bfloat16" or model.n_heads % tp:
        return  # another rule reports a tp that does not divide the heads
    heads = model.n_heads // tp
    sizes = [
        (model.query_rank, "<model.query_rank> is"),
        (model.kv_rank, "<model.kv_rank> is"),
        (heads * model.value_dim, "<model.value_dim> of the heads over <mesh.tp> makes"),
        (
            heads * (model.plain_dim + model.value_dim),
            "<model.value_dim> and the keys without <model.rope_dim> over <mesh.tp> make",
        ),
    ]
    for width, words in sizes:
        if width % FLOAT8_MULTIPLE:
            yield breach(
                "<precision.matmul> needs products whose sizes are multiples of "
                f"{FLOAT8_MULTIPLE}, but {words} {width}",
                "change these keys",
                use("precision.matmul", "compute"),
            )


@rule("precision.matmul", "parallel.async_tp")
def async_tp_fuses_no_float8(recipe: Recipe) -> Iterator[Breach]:
    """The compiler fuses collectives with products of what they carry, in the same dtype."""
    if recipe.precision.matmul == "float8" and recipe.parallel.async_tp:
        yield breach(
            "<precision.matmul> rounds what tp gathers before each product, so that "
            "<parallel.async_tp> cannot fuse the two",
            use("parallel.async_tp", False),
            use("precision.matmul", "compute"),
        )


@rule("parallel.attention_kernel", "precision.compute")
def flash_kernels_compute_in_bfloat16(recipe: Recipe) -> Iterator[Breach]:
    """Of the dtypes of recipes, FlashAttention has bfloat16 alone."""
    if recipe.parallel.attention_kernel != "torch" and recipe.precision.computes_in != "bfloat16":
        yield breach(
            "<parallel.attention_kernel> computes in bfloat16 alone, but <precision.compute>",
            use("parallel.attention_kernel", "torch"),
            use("precision.compute", "bfloat16"),
        )


@rule("memory.activation_checkpoint", "mesh.pp", "parallel.virtual_stages", "parallel.schedule")
def checkpointed_stages_are_some(recipe: Recipe) -> Iterator[Breach]:
    """A value for the first stages leaves at least one stage out."""
    checkpointing, all_stages = recipe.memory.checkpointing, n_stages_of(recipe)
    stages = checkpointing.blocks.stages
    if stages is not None and stages >= all_stages:
        fewer = [all_stages - 1] if all_stages > 1 else []
        values = (str(checkpointing.in_first(count)) for count in (*fewer, None))
        yield breach(
            "<memory.activation_checkpoint> must leave out a stage, but with <mesh.pp> there "
            + ("is one stage" if all_stages == 1 else f"are {all_stages} stages"),
            use("memory.activation_checkpoint", *values),
        )


@rule("compile.enabled", "memory.activation_checkpoint")
def experts_are_eager(recipe: Recipe) -> Iterator[Breach]:
    """The number of rows of an expert is known only when it runs, so no graph holds for it.

    A block is compiled around its experts. Checkpointing goes around the whole block, and does not
    see the operators inside of its graphs.
    """
    is_split = recipe.compile.enabled and recipe.model.experts
    if is_split and recipe.memory.checkpointing.mode == "selective":
        yield breach(
            "<compile.enabled> makes graphs around the experts of a block, and "
            "<memory.activation_checkpoint> cannot keep results of single operators in them",
            use("compile.enabled", False),
            use("memory.activation_checkpoint", "full", "none"),
        )


@rule("parallel.async_tp", "compile.enabled")
def async_tp_fuses_whole_blocks(recipe: Recipe) -> Iterator[Breach]:
    """No proof has fused products of blocks that are compiled around their experts."""
    if recipe.parallel.async_tp and recipe.compile.enabled and recipe.model.experts:
        yield breach(
            "<parallel.async_tp> is not proven for blocks that are compiled around their experts",
            use("parallel.async_tp", False),
        )


@rule("compile.enabled", "parallel.schedule", "mesh.pp")
def split_backward_is_eager(recipe: Recipe) -> Iterator[Breach]:
    """A compiled block has one backward graph, which cannot be split into two halves."""
    splits = SCHEDULES[recipe.parallel.schedule].splits_backward
    if recipe.compile.enabled and recipe.mesh.pp > 1 and splits:
        unsplit = [name for name, facts in SCHEDULES.items() if not facts.splits_backward]
        yield breach(
            "<compile.enabled> makes one graph of a block's backward, but <parallel.schedule> "
            "splits backward into two halves",
            use("compile.enabled", False),
            use("parallel.schedule", *unsplit),
        )


@rule("parallel.async_tp", "compile.enabled", "mesh.tp", "parallel.sequence_parallel")
def async_tp_fuses_products(recipe: Recipe) -> Iterator[Breach]:
    """The compiler fuses products with gathers and reduce-scatters of the sequence over tp."""
    if not recipe.parallel.async_tp:
        return
    if not recipe.compile.enabled:
        yield breach(
            "<parallel.async_tp> is work of the compiler, but <compile.enabled>",
            use("parallel.async_tp", False),
            use("compile.enabled", True),
        )
    if recipe.mesh.tp == 1:
        yield breach(
            "<parallel.async_tp> hides the collectives of tp, but <mesh.tp> has none",
            use("parallel.async_tp", False),
            "mesh.tp above 1",
        )
    elif not recipe.parallel.sequence_parallel:
        yield breach(
            "<parallel.async_tp> fuses all-gathers and reduce-scatters, but "
            "<parallel.sequence_parallel> has all-reduces",
            use("parallel.async_tp", False),
            use("parallel.sequence_parallel", True),
        )


# Violations are reported in this order.
RULES: tuple[Rule, ...] = (
    tp_divides_heads,
    tp_fits_kv_heads,
    tp_divides_ffn,
    ulysses_shards_heads,
    every_tp_rank_has_vocabulary,
    uneven_vocabulary_has_even_columns,
    sequence_divides,
    ep_divides_ranks,
    ep_needs_experts,
    ep_divides_experts,
    experts_need_sequence_parallel,
    experts_are_sharded_evenly,
    tp_divides_shared_ffn,
    world_can_be_started,
    stages_have_layers,
    schedule_accepts_virtual_stages,
    explicit_stages_fit,
    needed_with("parallel.schedule_csv", "parallel.schedule", {"csv": "the file of the schedule"}),
    batch_divides,
    schedule_accepts_micro_batches,
    zero_0_does_not_shard,
    pipeline_reduces_once,
    compute_fits_params,
    reduce_fits_params,
    narrow_gradients_are_sharded,
    gradients_of_experts_are_wide,
    float8_computes_in_bfloat16,
    float8_has_sizes_of_kernels,
    float8_has_sizes_of_experts,
    float8_has_sizes_of_latents,
    async_tp_fuses_no_float8,
    flash_kernels_compute_in_bfloat16,
    checkpointed_stages_are_some,
    experts_are_eager,
    async_tp_fuses_whole_blocks,
    split_backward_is_eager,
    async_tp_fuses_products,
)
