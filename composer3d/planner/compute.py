"""The computing time of blocks and of the head: products, attention, memory traffic. No torch here.

A product of (M, K) and (K, N) costs its FLOPs at the sustained rate, which a short K lowers, and
the time to move its matrices. The two overlap in part: the root of the sum of their squares is
taken. Attention has the rate of its kernel. Elementwise work costs its memory traffic.
"""

from typing import NamedTuple

from composer3d.facts.hardware import Hardware
from composer3d.planner.constants import Constants
from composer3d.planner.setup import Latents, Setup

# Memory streams reach this share of the datasheet's bandwidth (BabelStream and the like report 0.80
# to 0.92 on A100, H100 and MI300X).
MEMORY_SHARE = 0.85


_NORM = 2.0  # the two overlap, but not when both take equally long
# The tokens of the busiest rank's experts, of the mean, with an auxiliary loss; capacity factors of
# 1.25 are the custom.
_IMBALANCE = 1.15
_RAMP_K = 64.0  # the start and the end of a tile, as additional length of K
_BACKWARD_ATTENTION = 2.5  # five products in place of two
_BACKWARD_FLASH1 = 3.0
_BACKWARD_ELEMENTWISE = 1.9
_LAUNCH_S = 6e-6  # the host's time for one kernel
_SYNCHRONOUS_LAUNCH_S = 30e-6
_STATIC_POWER = 0.2  # memory, links and leakage, of the power limit
# Of a product in 16 bits at full clock: what H100 may draw beyond its static power, by its fastest
# product. What H100 loses by its limit is a fitted constant, ``matrix_share_hopper``. Blackwell has
# much the same silicon (TSMC 4N and 4NP); its factor is of 15 runs on one node of 8 B200
# (tools/planner_intervals.py); with 1.0 they are predicted 3% faster.
_JOULES_PER_FLOP = (1 - _STATIC_POWER) * 700 / 794.5e12
_ENERGY = {"hopper": 1.0, "blackwell": 1.08}
_ALIGNED = 8  # elements of a row that matrix units need: 16 bytes
# Batched products with other rows run on vector units in float32, at this share of their peak.
_VECTOR_SHARE = 0.75
# The outputs of one wave: 128 x 128 for each of about 128 multiprocessors.
_WAVE = 128.0 * 128.0 * 128.0
_KERNELS = {True: 22, False: 40}  # of a block's forward, by whether elementwise work is fused
_ROUNDING_KERNELS = {True: 2, False: 13}  # to round a matrix to float8, likewise

# FLOP/s of attention kernels with causal sequences without end and heads of 128, forward and
# backward together, as a share of the fastest matrix product: FlashAttention 2's paper (arXiv
# 2307.08691, figures 4 to 6), 3's (arXiv 2407.08608, figures 5 and 6), and, for B200, the 834
# TFLOP/s of the "Machine Learning Engineering" book at 8,192 tokens. Generations 1 and 2 do not use
# the new matrix units.
_FLASH_RATES = {
    ("flash1", "ampere"): 0.43,
    ("flash2", "ampere"): 0.70,
    ("flash3", "ampere"): 0.70,
    ("flash1", "hopper"): 0.25,
    ("flash2", "hopper"): 0.45,
    ("flash3", "hopper"): 0.72,
    ("flash1", "blackwell"): 0.12,
    ("flash2", "blackwell"): 0.21,
    ("flash3", "blackwell"): 0.60,
}
# The start and the end of each query's loop take as long as this many keys for each FLOP/s. In
# those figures, kernels of 117 TFLOP/s reach half of it at 250 tokens, of 1,000 TFLOP/s at 2,000.
_FLASH_RAMP_S = 2e-12
# The softmax of narrow heads costs as much as that of wide ones: 171 against 189 TFLOP/s for heads
# of 64 and 128 in FlashAttention 2's figures. The first generation is as fast for both.
_NARROW_HEADS = 0.9
_NEW_UNITS = ("hopper", "blackwell")


class ComputeRates(NamedTuple):
    """Sustained rates of a setup.

    Attributes:
        matrix: FLOP/s of large products of blocks.
        weight: FLOP/s of large products that make the weight gradients of blocks.
        head: FLOP/s of the head's products, which stay in 16 bits.
        attention: FLOP/s of the fastest product in 16 bits; attention never draws so much power
            that clocks fall.
        memory: bytes/s of a stream.
        tail: the outputs of a product that take as long as its last, partly filled wave of tiles.
        share: of the peak of a dtype, what large products sustain.
    """

    matrix: float
    weight: float
    head: float
    attention: float
    memory: float
    tail: float
    share: float


class Work(NamedTuple):
    """Seconds of one part of a model for one micro-batch.

    Attributes:
        forward_s: forward.
        input_s: gradients of inputs.
        weight_s: gradients of weights.
        recompute_s: what backward computes again.
        products_s: of all but ``recompute_s``, the matrix products of blocks.
        attention_s: of the same, attention itself, without its projections.
        head_s: of the same, the head and the loss.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    recompute_s: float = 0.0
    products_s: float = 0.0
    attention_s: float = 0.0
    head_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Seconds of backward, with what it computes again."""
        return self.input_s + self.weight_s + self.recompute_s


class Product(NamedTuple):
    """A matrix product (M, K) x (K, N), or ``copies`` of them.

    Attributes:
        rows: M, the tokens.
        columns: N, the outputs.
        depth: K, the inputs.
    """

    rows: float
    columns: float
    depth: float
    copies: float = 1.0

    @property
    def flops(self) -> float:
        """Floating-point operations of all copies; a multiply-add counts as 2."""
        return 2.0 * self.rows * self.columns * self.depth * self.copies

    def input_gradient(self) -> "Product":
        """Return the product that gives the gradient of the inputs: (M, N) x (N, K)."""
        return Product(self.rows, self.depth, self.columns, self.copies)

    def weight_gradient(self) -> "Product":
        """Return the product that gives the gradient of the weights: (N, M) x (M, K)."""
        return Product(self.columns, self.depth, self.rows, self.copies)


def rates(setup: Setup, constants: Constants) -> ComputeRates:
    """Return the sustained rates of a setup's device."""
    machine = setup.machine
    is_new = machine.hardware.generation in _NEW_UNITS
    share = constants.matrix_share_hopper if is_new else constants.matrix_share_ampere
    clock = _clock_share(machine.power_share)
    share *= clock * _product_share(machine.hardware)
    precision = setup.precision
    head_type = "bfloat16" if precision.matrix == "fp8" else precision.matrix
    weight_type = precision.weight_products or precision.matrix
    return ComputeRates(
        matrix=machine.hardware.matrix_rate(precision.matrix) * share,
        weight=machine.hardware.matrix_rate(weight_type) * share,
        head=machine.hardware.matrix_rate(head_type) * share,
        attention=machine.hardware.matrix_rate(head_type) * clock,
        memory=machine.hardware.memory_bytes_s * MEMORY_SHARE,
        tail=0.0 if machine.hardware.generation == "cpu" else constants.tail_waves * _WAVE,
        share=share,
    )


def _clock_share(power_share: float) -> float:
    """Return the clock under a lower power limit, as a share of the clock under the usual one.

    A part of the power does not depend on the clock. The rest falls about with its square, as the
    voltage can fall, too.
    """
    return ((power_share - _STATIC_POWER) / (1 - _STATIC_POWER)) ** 0.5 if power_share < 1 else 1.0


def _product_share(hardware: Hardware) -> float:
    """Return what the power limit leaves of the rate of large products, as on H100 at 700 W.

    A product of the same silicon takes the same energy for each FLOP. So a device with more FLOP/s
    for each watt than H100 must lower its clock further than it.
    """
    energy = _ENERGY.get(hardware.generation)
    if energy is None or not hardware.power_w or "bfloat16" not in hardware.peaks:
        return 1.0
    needed_w = energy * _JOULES_PER_FLOP * hardware.matrix_rate("bfloat16")
    left_w = (1 - _STATIC_POWER) * hardware.power_w
    return min(1.0, left_w / needed_w) ** 0.5


def product_s(
    product: Product, flops_s: float, rate: ComputeRates, output_bytes: float = 2.0
) -> float:
    """Return the seconds of a product in 16 bits.

    Args:
        product: its shape.
        flops_s: the sustained rate of large products.
        rate: the rate of a memory stream, and the tail.
        output_bytes: bytes moved for each element of the result.
    """
    rows, columns, depth, copies = product
    moved = copies * (2.0 * depth * (rows + columns) + output_bytes * rows * columns)
    computed = product.flops + 2.0 * depth * rate.tail
    return (
        (computed / flops_s * (1 + _RAMP_K / depth)) ** _NORM + (moved / rate.memory) ** _NORM
    ) ** (1 / _NORM)


def attention_products(setup: Setup) -> list[Product]:
    """Return the projections of a block's attention on one rank: queries to values, and output.

    Those down to latents take the tokens of one rank under sequence parallelism, else all.
    """
    sizes, tp, tokens = setup.sizes, setup.layout.tp, setup.tokens
    latents = sizes.latents
    if latents is not None:
        own_tokens = tokens / tp if setup.layout.sequence_parallel else tokens
        heads = sizes.heads / tp
        return [
            Product(own_tokens, latents.down, sizes.dim),
            Product(tokens, sizes.query_width / tp, latents.query or sizes.dim),
            _product_up(setup, latents),
            Product(tokens, sizes.dim, heads * latents.value),
        ]
    qkv = sizes.query_width + 2 * sizes.kv_width
    return [
        Product(tokens, qkv / tp, sizes.dim),
        Product(tokens, sizes.dim, sizes.query_width / tp),
    ]


def _product_up(setup: Setup, latents: Latents) -> Product:
    """Return the product that makes keys and values from latents.

    Where latents are sent, a rank computes it for the tokens of each rank of cp.
    """
    layout = setup.layout
    columns = setup.sizes.heads / layout.tp * (latents.plain + latents.value)
    copies = layout.cp if layout.sends_latents else 1
    return Product(setup.tokens, columns, latents.key, copies)


def ffn_products(setup: Setup, has_experts: bool) -> list[Product]:
    """Return the products of a feed-forward layer on one rank."""
    sizes, layout, tokens = setup.sizes, setup.layout, setup.tokens
    inner = sizes.ffn_matrices - 1
    if not has_experts:
        dense_width = sizes.ffn / layout.tp
        return [
            Product(tokens, inner * dense_width, sizes.dim),
            Product(tokens, sizes.dim, dense_width),
        ]
    products = [Product(tokens / layout.tp, sizes.experts, sizes.dim)]
    # The ranks of tp hold different tokens, or each a part of every expert. Both cut the work.
    held = max(1.0, sizes.experts / layout.ep)
    imbalance = 1.0 if setup.software.balances_routing else _IMBALANCE
    rows = imbalance * tokens * sizes.experts_per_token / held
    width: float = sizes.expert_width
    if layout.expert_tp:
        width /= layout.tp
    else:
        rows /= layout.tp
    products += [
        Product(rows, inner * width, sizes.dim, held),
        Product(rows, sizes.dim, width, held),
    ]
    if sizes.shared_width:
        width = sizes.shared_width / layout.tp
        products += [Product(tokens, inner * width, sizes.dim), Product(tokens, sizes.dim, width)]
    return products


def head_product(setup: Setup) -> Product:
    """Return the product that makes the logits on one rank."""
    return Product(setup.tokens, setup.sizes.vocab / setup.layout.tp, setup.sizes.dim)


def keys_per_query(setup: Setup, window: int) -> float:
    """Return the mean number of keys that a causal query sees in a block with this window."""
    seq_len = setup.batch.seq_len
    width = min(window or seq_len, seq_len)
    return width - width * (width - 1) / 2 / seq_len


def keys_of_busiest(setup: Setup, window: int) -> float:
    """Return the mean number of keys that a query of the busiest rank of cp sees.

    If each rank holds consecutive tokens, that is the last one: its queries see most keys, and the
    other ranks wait for it. With ulysses, each rank has all tokens of some heads.
    """
    layout, seq_len = setup.layout, setup.batch.seq_len
    if layout.cp == 1 or layout.cp_balanced or layout.cp_method == "ulysses":
        return keys_per_query(setup, window)
    # Query number i sees i keys, or as many as fit into the window.
    first, width = seq_len - seq_len // layout.cp, min(window or seq_len, seq_len)
    growing = max(0, width - first)
    return width - growing * (growing - 1) / 2 / (seq_len - first)


def merge_product(setup: Setup) -> Product:
    """Return the product before a depth of multi-token prediction, of this rank's tokens."""
    tokens, layout = setup.tokens, setup.layout
    own_tokens = tokens / layout.tp if layout.sequence_parallel else tokens
    return Product(own_tokens, setup.sizes.dim, 2 * setup.sizes.dim)


def block_work(
    setup: Setup, constants: Constants, *, has_experts: bool, window: int, predicts: bool = False
) -> Work:
    """Return the computing time of one block for one micro-batch, without collectives.

    Args:
        setup: what runs, on what.
        constants: the fitted constants.
        has_experts: whether the feed-forward layer has experts.
        window: the sliding window of the block's attention in tokens; 0: none.
        predicts: whether it is a depth of multi-token prediction.
    """
    rate = rates(setup, constants)

    def seconds(products: list[Product]) -> float:
        return sum(product_s(product, rate.matrix, rate) for product in products)

    attention_parts = attention_products(setup)
    ffn_parts = ffn_products(setup, has_experts)
    products = attention_parts + ffn_parts + [merge_product(setup)] * predicts
    forward_products = seconds(products)
    input_products = seconds([product.input_gradient() for product in products])
    weight_products = sum(
        product_s(product.weight_gradient(), rate.weight, rate, _gradient_bytes(setup))
        for product in products
    )
    attend_forward, attend_backward = attend_s(setup, rate, window)
    traffic = constants.fused_traffic
    if not setup.software.fuses_elementwise:
        traffic = constants.eager_traffic
    moved_bytes = _elementwise_bytes(setup, has_experts=has_experts)
    if predicts:  # two norms, and their results as one tensor, each read and written
        moved_bytes += 4 * 4.0 * setup.sizes.dim * merge_product(setup).rows
    elementwise = moved_bytes / rate.memory * traffic
    # Only the products of outputs and of input gradients round their operands. Those of experts are
    # never compiled.
    rounding = input_rounding = 0.0
    launches = _KERNELS[setup.software.fuses_elementwise]
    if setup.precision.weight_products is not None:
        of_ffn = constants.eager_traffic if has_experts else traffic
        for parts, moved in ((attention_parts, traffic), (ffn_parts, of_ffn)):
            rounding += sum(map(_rounded_bytes, parts)) / rate.memory * moved
            gradients = [product.input_gradient() for product in parts]
            input_rounding += sum(map(_rounded_bytes, gradients)) / rate.memory * moved
        # The inputs and the weights of four layers, and those of three.
        fuses = setup.software.fuses_elementwise
        launches += 8 * _ROUNDING_KERNELS[fuses]
        launches += 6 * _ROUNDING_KERNELS[fuses and not has_experts]
    gap = launches * constants.kernel_gap_s
    forward = forward_products + attend_forward + elementwise + rounding + gap
    last_product = seconds([ffn_parts[-1]])
    recompute = {
        "none": 0.0,
        "attention": attend_forward,
        "matrix": elementwise + rounding,
        "half_matrix": elementwise + rounding + 0.5 * forward_products,
        "half_blocks": 0.5 * forward,
        "full": forward,
    }[setup.recompute]
    if setup.recompute in ("full", "half_blocks") and setup.software.stops_recompute_early:
        recompute -= last_product * (1.0 if setup.recompute == "full" else 0.5)

    # The host launches kernels one after the other; the device cannot be faster.
    backward_input = input_products + attend_backward + _BACKWARD_ELEMENTWISE * elementwise + gap
    backward_input += input_rounding
    all_products = forward_products + input_products + weight_products
    if setup.layout.sends_latents and setup.sizes.latents is not None:
        # Attention keeps no keys and values: its backward makes them again.
        repeated = seconds([_product_up(setup, setup.sizes.latents)])
        backward_input += repeated
        all_products += repeated
    attention = attend_forward + attend_backward
    if setup.software.launches_synchronously:
        launch = launches * _SYNCHRONOUS_LAUNCH_S
        again = launch if recompute > 0.5 * forward else 0.0
        return Work(
            forward + launch,
            backward_input + launch,
            weight_products + launch,
            recompute + again,
            all_products,
            attention,
        )
    launch = launches * _LAUNCH_S
    return Work(
        max(forward, launch),
        max(backward_input, launch),
        max(weight_products, 0.5 * launch),
        max(recompute, launch) if recompute > 0.5 * forward else recompute,
        all_products,
        attention,
    )


def _gradient_bytes(setup: Setup) -> float:
    """Return the bytes that move for each element of a weight's gradient in one micro-batch.

    A sum over micro-batches is read and written: by the product itself, or by a further kernel,
    which also reads what the product wrote.
    """
    if setup.layout.zero == 3 or setup.batch.micro_batches == 1:
        return 2.0
    if setup.software.fuses_weight_gradients:
        return 2.0 * setup.precision.gradients
    return 2.0


def summing_s(setup: Setup, parameters: float, rate: ComputeRates) -> float:
    """Return the seconds in which gradients of one micro-batch are added to the sum."""
    is_needed = setup.layout.zero <= 2 and setup.batch.micro_batches > 1
    if not is_needed or setup.software.fuses_weight_gradients:
        return 0.0
    return _adding_s(setup, parameters, rate)


def _adding_s(setup: Setup, parameters: float, rate: ComputeRates) -> float:
    """Return the seconds in which gradients in 16 bits are read and added to a sum."""
    return (2.0 + 2.0 * setup.precision.gradients) * parameters / rate.memory


def attend_s(setup: Setup, rate: ComputeRates, window: int) -> tuple[float, float]:
    """Return the seconds of attention itself, forward and backward, of a block with this window."""
    sizes, layout = setup.sizes, setup.layout
    heads = sizes.heads / layout.tp
    seq_len = setup.batch.seq_len
    kernel = setup.software.attention
    if 0 < window < seq_len:
        kernel = setup.software.attention_of_windows or kernel
    if kernel == "unfused":
        return _unfused_attend_s(setup, rate)
    flops_per_key = 4.0 * setup.tokens * heads * sizes.head_width
    generation = setup.machine.hardware.generation
    if (kernel, generation) not in _FLASH_RATES:
        generation = "ampere"
    share = _FLASH_RATES[kernel, generation]
    is_first = kernel == "flash1"
    if sizes.head_width < 96 and not is_first:
        share *= _NARROW_HEADS
    flops_s = rate.attention * share
    flops_s *= seq_len / (seq_len + _FLASH_RAMP_S * flops_s)
    forward = flops_per_key * keys_of_busiest(setup, window) / flops_s
    return forward, forward * (_BACKWARD_FLASH1 if is_first else _BACKWARD_ATTENTION)


def _unfused_attend_s(setup: Setup, rate: ComputeRates) -> tuple[float, float]:
    """Return the seconds of attention that writes its scores to memory, forward and backward.

    Batched products, masked scores included; one fused kernel of scale, mask and softmax; dropout.
    The products are short in one dimension, so that the traffic of the scores bounds them.
    """
    sizes, seq_len = setup.sizes, setup.batch.seq_len
    copies = setup.tokens / seq_len * sizes.heads / setup.layout.tp
    flops_s = rate.matrix
    if sizes.head_width % _ALIGNED:
        vector_peak = setup.machine.hardware.peaks.get("float32", rate.matrix)
        flops_s = min(flops_s, _VECTOR_SHARE * vector_peak)
    scores, weighted = (
        product_s(product, flops_s, rate)
        for product in (
            Product(seq_len, seq_len, sizes.head_width, copies),
            Product(seq_len, sizes.head_width, seq_len, copies),
        )
    )
    # Softmax reads and writes all scores in 16 bits; dropout does, too, and writes its mask.
    # Backward reads one matrix more in both.
    has_dropout = setup.software.dropout
    byte_of_scores_s = copies * seq_len * seq_len / rate.memory
    forward = scores + weighted + (9 if has_dropout else 4) * byte_of_scores_s
    # The gradients of probabilities and scores, and the products that they are in.
    backward = scores + 3 * weighted + (11 if has_dropout else 6) * byte_of_scores_s
    return forward, backward


def _rounded_bytes(product: Product) -> float:
    """Return the memory traffic of rounding the operands of a product to 8 bits, in bytes.

    An operand in 16 bits is read for its largest numbers, read again, and written.
    """
    return product.copies * (2 + 2 + 1) * product.depth * (product.rows + product.columns)


def _elementwise_bytes(setup: Setup, *, has_experts: bool) -> float:
    """Return the memory traffic of a block's elementwise work in forward, in bytes, in 16 bits.

    For each element of the residual stream: norms (read, write) and two additions (read twice,
    write). Norms in float32 also cast what they read and write, if that is not fused. For queries:
    rotation, transposition, copy. For the feed-forward layer: its activation, and the product with
    the gate.
    """
    sizes, layout, tokens = setup.sizes, setup.layout, setup.tokens
    tp = layout.tp
    stream_tokens = tokens / tp if layout.sequence_parallel else tokens
    casts = sizes.wide_norms and not setup.software.fuses_elementwise
    per_norm = 20.0 if casts else 4.0  # a cast moves 2 + 4 bytes, and the norm 4 + 4
    moved = (per_norm * sizes.norms + 12.0) * sizes.dim * stream_tokens
    kv_width = sizes.kv_width * (layout.cp if layout.sends_latents else 1)
    moved += (12.0 * sizes.query_width + 12.0 * kv_width) * tokens / tp
    per_width = 4.0 * (sizes.ffn_matrices - 1)
    if has_experts:
        width = sizes.expert_width * sizes.experts_per_token + sizes.shared_width
        # Tokens are sorted by expert, and their results are added.
        moved += 8.0 * sizes.dim * sizes.experts_per_token * tokens / tp
    else:
        width = sizes.ffn
    moved += per_width * width * tokens / tp
    if setup.software.dropout:
        moved += 10.0 * sizes.dim * stream_tokens
    return moved


def head_work(setup: Setup, constants: Constants) -> Work:
    """Return the computing time of the head and the loss for one micro-batch."""
    rate = rates(setup, constants)
    product = head_product(setup)
    columns = product.columns if setup.layout.loss_parallel else setup.sizes.vocab
    forward = product_s(product, rate.head, rate)
    # In float32: a cast, the maximum, the sum, the loss; backward reads and writes as often.
    per_logit = 4.0 if setup.software.fuses_loss else 15.0
    loss = per_logit * product.rows * columns / rate.memory
    weight_gradient = product_s(product.weight_gradient(), rate.head, rate)
    if setup.loss_chunks > 1:
        weight_gradient += setup.loss_chunks * _adding_s(
            setup, product.depth * product.columns, rate
        )
    forward += loss
    input_gradient = product_s(product.input_gradient(), rate.head, rate) + loss
    return Work(
        forward,
        input_gradient,
        weight_gradient,
        forward if setup.repeats_loss else 0.0,
        head_s=forward + input_gradient + weight_gradient,
    )
