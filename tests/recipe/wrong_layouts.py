"""Layouts that cannot be run: context parallelism, pipeline schedules and cuts, zero, precision."""

from tests.recipe.wrong import TINY, Wrong

LAYOUTS = [
    Wrong(
        "no cp", TINY + "[mesh]\ncp = 0\n", ["x.toml:4: mesh.cp = 0 must be from 1 to 1_048_576"]
    ),
    Wrong(
        "cp, sequence",
        TINY + "[data]\nseq_len = 30\n[mesh]\ncp = 4\n",
        [
            "x.toml:4: data.seq_len = 30 must be a multiple of 8: mesh.cp = 4 (x.toml:6) cuts it "
            "into 8 chunks; use 24 or 32"
        ],
    ),
    Wrong(
        "cp and tp, sequence",
        TINY + "[data]\nseq_len = 10\n[mesh]\ncp = 3\ntp = 2\n",
        [
            "x.toml:4: data.seq_len = 10 must be a multiple of 6: mesh.cp = 3 (x.toml:6) cuts it "
            "into 6 chunks, and mesh.tp = 2 (x.toml:7) with parallel.sequence_parallel = true "
            "(default) cuts the part of each rank again; use 6 or 12"
        ],
    ),
    Wrong(
        "cp, heads of ulysses",
        TINY + '[mesh]\ncp = 3\n[parallel]\ncp_method = "ulysses"\n[data]\nseq_len = 240\n',
        [
            'x.toml:4: mesh.cp = 3 with parallel.cp_method = "ulysses" (x.toml:6) must divide '
            "model.n_heads = 4 (preset debug-tiny) and model.n_kv_heads = 2 (preset debug-tiny); "
            'use 1 or 2, or parallel.cp_method = "ring"'
        ],
    ),
    Wrong(
        "cp, heads of ulysses over tp",
        TINY + '[mesh]\ncp = 2\ntp = 2\n[parallel]\ncp_method = "ulysses"\n',
        [
            'x.toml:4: mesh.cp = 2 with parallel.cp_method = "ulysses" (x.toml:7) must divide 2 '
            "and 1, the heads and key-value heads of each rank: model.n_heads = 4 (preset "
            "debug-tiny) and model.n_kv_heads = 2 (preset debug-tiny) over mesh.tp = 2 (x.toml:5); "
            'use 1, or parallel.cp_method = "ring"'
        ],
    ),
    Wrong(
        "world too large",
        TINY
        + "[mesh]\ndp_replicate = 1_048_576\ndp_shard = 32\n"
        + "[data]\nglobal_batch = 33_554_432\n",
        [
            "x.toml:4: mesh.pp = 1 (default) x mesh.dp_replicate = 1048576 x mesh.dp_shard = 32 "
            "(x.toml:5) x mesh.cp = 1 (default) x mesh.tp = 1 (default) is a world of 33_554_432 "
            "processes; it must be at most 16_777_216"
        ],
    ),
    Wrong(
        "virtual stages of 1F1B",
        TINY + "[mesh]\npp = 2\n[parallel]\nvirtual_stages = 2\n",
        [
            'x.toml:6: parallel.virtual_stages = 2 does not fit parallel.schedule = "1F1B" '
            "(default), which needs 1; use 1, or remove it"
        ],
    ),
    Wrong(
        "one virtual stage interleaved",
        TINY + '[mesh]\npp = 2\n[parallel]\nvirtual_stages = 1\nschedule = "Interleaved1F1B"\n',
        [
            "x.toml:6: parallel.virtual_stages = 1 does not fit parallel.schedule = "
            '"Interleaved1F1B" (x.toml:7), which needs 2 or more; use 2 or more, or remove it'
        ],
    ),
    Wrong(
        "no virtual stage",
        TINY + "[parallel]\nvirtual_stages = 0\n",
        ["x.toml:4: parallel.virtual_stages = 0 must be from 1 to 10_000"],
    ),
    Wrong(
        "no block of a unit",
        TINY + "[parallel]\nfsdp_blocks = 0\n",
        ["x.toml:4: parallel.fsdp_blocks = 0 must be from 1 to 10_000"],
    ),
    Wrong(
        "more virtual stages than layers",
        TINY + '[mesh]\npp = 4\n[parallel]\nschedule = "Interleaved1F1B"\n',
        [
            "x.toml:4: mesh.pp = 4 with 2 stages per rank makes 8 stages, but model.n_layers = 4 "
            "(preset debug-tiny): every stage needs a layer; use at most 2"
        ],
    ),
    Wrong(
        "cut of too few stages",
        TINY + "[mesh]\npp = 4\n[parallel]\nstages = [2, 2]\n",
        [
            "x.toml:6: parallel.stages = [2, 2] has 2 stages, but mesh.pp = 4 (x.toml:4) with 1 "
            "per rank makes 4; use 4 numbers, or remove it"
        ],
    ),
    Wrong(
        "cut of an empty stage",
        TINY + "[mesh]\npp = 2\n[parallel]\nstages = [4, 0]\n",
        ["x.toml:6: parallel.stages = [4, 0] must give every stage at least 1 layer"],
    ),
    Wrong(
        "cut of too many layers",
        TINY + "[mesh]\npp = 2\n[parallel]\nstages = [3, 2]\n",
        [
            "x.toml:6: parallel.stages = [3, 2] has 5 layers in total, but model.n_layers = 4 "
            "(preset debug-tiny); the two must be equal"
        ],
    ),
    Wrong(
        "uneven rounds",
        TINY
        + '[mesh]\npp = 2\n[parallel]\nschedule = "Interleaved1F1B"\n[data]\nglobal_batch = 5\n',
        [
            "x.toml:8: data.global_batch = 5 over data.micro_batch = 1 (default) x "
            "mesh.dp_replicate = 1 (default) x mesh.dp_shard = 1 (default) gives a rank 5 "
            'micro-batches, but parallel.schedule = "Interleaved1F1B" (x.toml:6) needs a '
            "multiple of 2, to form 2 equal rounds of at least mesh.pp = 2 (x.toml:4) "
            "micro-batches; use data.global_batch = 4 or 6"
        ],
    ),
    Wrong(
        "virtual stages of a V",
        TINY + '[mesh]\npp = 2\n[parallel]\nvirtual_stages = 1\nschedule = "ZBVZeroBubble"\n',
        [
            "x.toml:6: parallel.virtual_stages = 1 does not fit parallel.schedule = "
            '"ZBVZeroBubble" (x.toml:7), which needs 2; use 2, or remove it'
        ],
    ),
    Wrong(
        "too few micro-batches for DualPipeV",
        TINY + '[mesh]\npp = 2\n[parallel]\nschedule = "DualPipeV"\n[data]\nglobal_batch = 3\n',
        [
            "x.toml:8: data.global_batch = 3 over data.micro_batch = 1 (default) x "
            "mesh.dp_replicate = 1 (default) x mesh.dp_shard = 1 (default) gives a rank 3 "
            'micro-batches, but parallel.schedule = "DualPipeV" (x.toml:6) needs at least twice '
            'mesh.pp = 2 (x.toml:4); use data.global_batch = 4, or parallel.schedule = "GPipe", '
            "which accepts fewer"
        ],
    ),
    Wrong(
        "csv without a file",
        TINY + '[mesh]\npp = 2\n[parallel]\nschedule = "csv"\n',
        [
            'x.toml:6: parallel.schedule = "csv" needs parallel.schedule_csv: the file of the '
            "schedule"
        ],
    ),
    Wrong(
        "a file without csv",
        TINY + '[parallel]\nschedule_csv = "own.csv"\n',
        [
            'x.toml:4: parallel.schedule_csv = "own.csv" is not used with parallel.schedule = '
            '"1F1B" (default); remove it, or use parallel.schedule = "csv"'
        ],
    ),
    Wrong(
        "csv file that is not there",
        TINY + '[mesh]\npp = 2\n[parallel]\nschedule = "csv"\nschedule_csv = "own.csv"\n',
        [
            "x.toml:7: the schedule own.csv cannot be read (No such file or directory)",
        ],
    ),
    Wrong(
        "zero 2 with a pipeline",
        TINY + "[mesh]\npp = 2\n[parallel]\nzero = 2\n",
        [
            "x.toml:6: parallel.zero = 2 reduces gradients after each micro-batch, but with "
            "mesh.pp = 2 (x.toml:4) they stay whole until the last one; use parallel.zero = 1 or "
            "3"
        ],
    ),
    Wrong(
        "compute wider than params",
        TINY + '[precision]\ncompute = "float64"\n',
        [
            'x.toml:4: precision.compute = "float64" does not fit precision.params = "float32" '
            '(default); use "float32" or "bfloat16"'
        ],
    ),
    Wrong(
        "proof in bfloat16",
        TINY + '[precision]\nparams = "float64"\ncompute = "bfloat16"\n',
        [
            'x.toml:5: precision.compute = "bfloat16" does not fit precision.params = "float64" '
            '(x.toml:4); use "float64"'
        ],
    ),
    Wrong(
        "float8 in float32",
        TINY + '[precision]\nmatmul = "float8"\n',
        [
            'x.toml:4: precision.matmul = "float8" needs forward and backward in bfloat16, but '
            'they are in float32; use precision.compute = "bfloat16", or precision.matmul = '
            '"compute"'
        ],
    ),
    Wrong(
        "float8, sizes of products",
        TINY
        + "n_heads = 3\nn_kv_heads = 1\nhead_dim = 24\nffn = 100\ndim = 72\n[precision]\n"
        + 'compute = "bfloat16"\nmatmul = "float8"\n',
        [
            'x.toml:10: precision.matmul = "float8" needs products whose sizes are multiples of '
            f"16, but {keys} makes {rows}; change these keys, or use precision.matmul = "
            '"compute"'
            for keys, rows in (
                ("model.dim = 72 (x.toml:7)", 72),
                ("model.n_heads = 3 (x.toml:3) of width 24 over mesh.tp = 1 (default)", 72),
                ("model.n_kv_heads = 1 (x.toml:4) of width 24 over mesh.tp = 1 (default)", 24),
                ("model.ffn = 100 (x.toml:6) over mesh.tp = 1 (default)", 100),
            )
        ],
    ),
    Wrong(
        "float8, sizes over tp",
        TINY + '[mesh]\ntp = 4\n[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n',
        [
            'x.toml:7: precision.matmul = "float8" needs products whose sizes are multiples of '
            "16, but model.ffn = 160 (preset debug-tiny) over mesh.tp = 4 (x.toml:4) makes 40; "
            'change these keys, or use precision.matmul = "compute"'
        ],
    ),
    Wrong(
        "float8 and async_tp",
        TINY
        + "[mesh]\ntp = 2\n[compile]\nenabled = true\n[parallel]\nasync_tp = true\n[precision]\n"
        + 'compute = "bfloat16"\nmatmul = "float8"\n',
        [
            'x.toml:11: precision.matmul = "float8" rounds what tp gathers before each product, so '
            "that parallel.async_tp = true (x.toml:8) cannot fuse the two; use parallel.async_tp = "
            'false, or precision.matmul = "compute"'
        ],
    ),
    Wrong(
        "proof with gradients in bfloat16",
        TINY + '[precision]\nparams = "float64"\nreduce = "bfloat16"\n[mesh]\ndp_shard = 2\n',
        [
            'x.toml:5: precision.reduce = "bfloat16" does not fit precision.params = "float64" '
            "(x.toml:4); remove precision.reduce"
        ],
    ),
    Wrong(
        "proof with gradients in float32",
        TINY + '[precision]\nparams = "float64"\nreduce = "float32"\n',
        [
            'x.toml:5: precision.reduce = "float32" does not fit precision.params = "float64" '
            "(x.toml:4); remove precision.reduce"
        ],
    ),
    Wrong(
        "gradients in bfloat16 of replicas",
        TINY
        + '[precision]\nreduce = "bfloat16"\n[mesh]\ndp_replicate = 2\ndp_shard = 1\n'
        + "[parallel]\nzero = 0\n",
        [
            'x.toml:4: precision.reduce = "bfloat16" is for gradients that are summed over shards, '
            "but parallel.zero = 0 (x.toml:9) all-reduces whole ones; use parallel.zero = 1 or 3, "
            "or remove precision.reduce"
        ],
    ),
    Wrong(
        "gradients in bfloat16 without shards",
        TINY + '[precision]\nreduce = "bfloat16"\n[mesh]\npp = 2\ndp_replicate = 2\ndp_shard = 1\n',
        [
            'x.toml:4: precision.reduce = "bfloat16" is for gradients that are summed over shards, '
            "but mesh.dp_shard = 1 (x.toml:8) x mesh.cp = 1 (default) makes no shards; use a "
            "larger mesh.dp_shard, or remove precision.reduce"
        ],
    ),
    Wrong(
        "half precision",
        TINY + '[precision]\ncompute = "float16"\n',
        [
            'x.toml:4: \'precision.compute\' must be "float32", "float64" or "bfloat16", got '
            '"float16"'
        ],
    ),
    Wrong(
        "checkpointing of another name",
        TINY + '[memory]\nactivation_checkpoint = "op"\n',
        [
            'x.toml:4: memory.activation_checkpoint = "op" must be "none", "selective", "full", or '
            '"every N blocks" with a number N from 1 to 10_000, such as "every 2 blocks"'
        ],
    ),
    *(
        Wrong(
            f"checkpointing of {number} blocks",
            TINY + f'[memory]\nactivation_checkpoint = "every {number} blocks"\n',
            [
                f'x.toml:4: memory.activation_checkpoint = "every {number} blocks" must be "none", '
                '"selective", "full", or "every N blocks" with a number N from 1 to 10_000, such '
                'as "every 2 blocks"'
            ],
        )
        for number in ("0", "two", "-1", "1.5", "10001")
    ),
    Wrong(
        "compiled backward in two halves",
        TINY
        + '[mesh]\npp = 2\n[parallel]\nschedule = "ZBVZeroBubble"\n[compile]\nenabled = true\n',
        [
            "x.toml:8: compile.enabled = true makes one graph of a block's backward, but "
            'parallel.schedule = "ZBVZeroBubble" (x.toml:6) splits backward into two halves; use '
            'compile.enabled = false, or parallel.schedule = "GPipe", "1F1B", "LoopedBFS" or '
            '"Interleaved1F1B"'
        ],
    ),
    Wrong(
        "async tp without a compiler, tp",
        TINY + "[parallel]\nasync_tp = true\n",
        [
            "x.toml:4: parallel.async_tp = true is work of the compiler, but compile.enabled = "
            "false (default); use parallel.async_tp = false, or compile.enabled = true",
            "x.toml:4: parallel.async_tp = true hides the collectives of tp, but mesh.tp = 1 "
            "(default) has none; use parallel.async_tp = false, or mesh.tp above 1",
        ],
    ),
    Wrong(
        "async tp without sequence parallelism",
        TINY
        + "[mesh]\ntp = 2\n[compile]\nenabled = true\n"
        + "[parallel]\nasync_tp = true\nsequence_parallel = false\n",
        [
            "x.toml:8: parallel.async_tp = true fuses all-gathers and reduce-scatters, but "
            "parallel.sequence_parallel = false (x.toml:9) has all-reduces; use "
            "parallel.async_tp = false, or parallel.sequence_parallel = true"
        ],
    ),
    Wrong(
        "globs that match nothing",
        TINY + '[optim]\ntrain = ["last.*", "<mesh.tp>", "*.lora"]\n',
        [
            'x.toml:4: optim.train = ["last.*", "<mesh.tp>", "*.lora"] has a glob at place '
            f"{place} that matches no parameter that can train; those are first.embed.weight, "
            "blocks.0.attn_norm.weight, blocks.0.attn.wq.weight, blocks.0.attn.wk.weight, "
            "blocks.0.attn.wv.weight, blocks.0.attn.wo.weight, ..."
            for place in (2, 3)
        ],
    ),
    Wrong(
        "a stage that trains nothing",
        TINY + '[mesh]\npp = 2\n[optim]\ntrain = ["blocks.1.*"]\n',
        [
            'x.toml:6: optim.train = ["blocks.1.*"] trains nothing in stage 1 of 2 of mesh.pp = 2 '
            "(x.toml:4), with blocks 2 to 3; match a parameter of every stage, use mesh.pp = 1, or "
            "another cut (parallel.stages)"
        ],
    ),
]
