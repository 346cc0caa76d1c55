"""Models with experts, and layouts of experts, that are refused."""

from tests.recipe.wrong import MOE_PRESETS, OLMO2_PRESETS, PRESETS, TINY, Wrong

# Lines 1 to 3: dim 64, 4 layers, 4 heads, 2 key-value heads, width of an expert 96, 8 experts.
MOE = '[model]\narchitecture = "moe"\npreset = "debug-moe"\n'

EXPERTS = [
    Wrong(
        "preset of another architecture",
        '[model]\narchitecture = "moe"\npreset = "llama3-8b"\n',
        [
            f'x.toml:3: model.preset = "llama3-8b" is unknown; the presets are {MOE_PRESETS}; with '
            f'model.architecture = "llama" they are {PRESETS}; with '
            f'model.architecture = "olmo2" they are {OLMO2_PRESETS}'
        ],
    ),
    Wrong(
        "ranges of experts",
        MOE
        + "experts = 0\nexperts_per_token = 0\nrouter_scale = 0\nbias_rate = 2\n"
        + "balance_loss = -1\n[mesh]\nep = 0\n",
        [
            "x.toml:4: model.experts = 0 must be from 1 to 65_536",
            "x.toml:5: model.experts_per_token = 0 must be from 1 to 65_536",
            "x.toml:6: model.router_scale = 0.0 must be above 0 and at most 1_000",
            "x.toml:7: model.bias_rate = 2.0 must be from 0 to 1",
            "x.toml:8: model.balance_loss = -1.0 must be from 0 to 1_000",
            "x.toml:10: mesh.ep = 0 must be from 1 to 1_048_576",
        ],
    ),
    Wrong(
        "gradients of experts in bfloat16",
        MOE + '[precision]\nreduce = "bfloat16"\n[mesh]\ndp_shard = 2\n',
        [
            'x.toml:5: precision.reduce = "bfloat16" does not work for a model with experts, whose '
            "gradients are summed over other ranks than those of the rest of their block; remove "
            "precision.reduce"
        ],
    ),
    Wrong(
        "experts in float8",
        MOE + '[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n',
        [
            'x.toml:6: precision.matmul = "float8" does not work for a model with experts, whose '
            "grouped products are in the dtype of precision.compute; use precision.matmul = "
            '"compute"'
        ],
    ),
    Wrong(
        "groups of experts",
        MOE + "expert_groups = 3\n",
        [
            "x.toml:4: model.expert_groups = 3 must divide model.experts = 8 (default); use 1, 2, "
            "4 or 8"
        ],
    ),
    Wrong(
        "groups of a token",
        MOE + "expert_groups = 2\ngroups_per_token = 3\n",
        ["x.toml:5: model.groups_per_token = 3 must be at most model.expert_groups = 2 (x.toml:4)"],
    ),
    Wrong(
        "experts of a token",
        MOE + "experts_per_token = 9\n",
        ["x.toml:4: model.experts_per_token = 9 must be at most model.experts = 8 (default)"],
    ),
    Wrong(
        "experts in the groups of a token",
        MOE + "expert_groups = 4\ngroups_per_token = 2\nexperts_per_token = 5\n",
        [
            "x.toml:6: model.experts_per_token = 5 must be at most 4: a token chooses "
            "model.groups_per_token = 2 (x.toml:5) of model.expert_groups = 4 (x.toml:4), each "
            "with 2 experts"
        ],
    ),
    Wrong(
        "no layer with experts",
        MOE + "moe_every = 5\ndense_layers = 4\n",
        [
            "x.toml:5: model.dense_layers = 4 and model.moe_every = 5 (x.toml:4) leave no block "
            "with experts among model.n_layers = 4 (preset debug-moe); use a smaller "
            'model.dense_layers or model.moe_every, or model.architecture = "llama"'
        ],
    ),
    Wrong(
        "a router that learns nothing",
        MOE + "experts_per_token = 1\n",
        [
            "x.toml:4: model.renormalise = true (default) with model.experts_per_token = 1 makes "
            "every weight 1, so that the loss teaches the router nothing; use model.renormalise = "
            "false"
        ],
    ),
    Wrong(
        "a rate without a bias",
        MOE + "bias_rate = 0.5\n",
        [
            "x.toml:4: model.bias_rate = 0.5 is not used with model.router_bias = false (default); "
            "remove it, or use model.router_bias = true"
        ],
    ),
    Wrong(
        "ep, ranks",
        MOE + "[mesh]\nep = 4\ndp_shard = 2\n",
        [
            "x.toml:5: mesh.ep = 4 must divide mesh.dp_shard = 2 (x.toml:6) x mesh.cp = 1 "
            "(default) x mesh.tp = 1 (default), which is 2; use 1 or 2"
        ],
    ),
    Wrong(
        "ep of a dense model",
        TINY + "[mesh]\nep = 2\ndp_shard = 2\n",
        [
            "x.toml:4: mesh.ep = 2 shares experts between ranks, but a model of "
            'model.architecture = "llama" (default) has none; use mesh.ep = 1, or '
            'model.architecture = "moe"'
        ],
    ),
    Wrong(
        "ep, experts",
        MOE + "experts = 6\n[mesh]\nep = 4\ndp_shard = 4\n",
        ["x.toml:6: mesh.ep = 4 must divide model.experts = 6 (x.toml:4); use 1 or 2"],
    ),
    Wrong(
        "experts without sequence parallelism",
        MOE + "[mesh]\ntp = 2\n[parallel]\nsequence_parallel = false\n",
        [
            "x.toml:7: parallel.sequence_parallel = false with mesh.tp = 2 (x.toml:5) leaves all "
            "tokens on every tp rank, so experts would compute each token 2 times; use "
            "parallel.sequence_parallel = true, or mesh.tp = 1"
        ],
    ),
    Wrong(
        "experts in uneven shards",
        MOE + "expert_ffn = 50\n[mesh]\ndp_shard = 2\ntp = 2\nep = 1\n",
        [
            "x.toml:8: mesh.ep = 1 leaves 4 ranks of mesh.dp_shard = 2 (x.toml:6) x mesh.cp = 1 "
            "(default) x mesh.tp = 2 (x.toml:7) to shard each expert: they must divide model.dim "
            "= 64 (preset debug-moe) and 50, the width of an expert; use 2 or 4"
        ],
    ),
    Wrong(
        "experts in uneven shards on every ep",
        MOE + "[mesh]\ndp_shard = 5\n[data]\nglobal_batch = 10\n",
        [
            "x.toml:5: mesh.ep = 1 (default) leaves 5 ranks of mesh.dp_shard = 5 x mesh.cp = 1 "
            "(default) x mesh.tp = 1 (default) to shard each expert: they must divide model.dim "
            "= 64 (preset debug-moe) and 96, the width of an expert; use other sizes of the mesh"
        ],
    ),
    Wrong(
        "tp, shared expert",
        MOE + "shared_ffn = 30\n[mesh]\ntp = 4\n",
        ["x.toml:6: mesh.tp = 4 must divide model.shared_ffn = 30 (x.toml:4); use 1 or 2"],
    ),
    Wrong(
        "compiled experts",
        MOE + "[compile]\nenabled = true\n",
        [
            "x.toml:5: compile.enabled = true makes one graph of a block, but the number of "
            "tokens of each expert changes in every step; use compile.enabled = false"
        ],
    ),
]
