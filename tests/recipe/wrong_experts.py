"""Models with experts, and layouts of experts, that are refused."""

from tests.recipe.wrong import TINY, Wrong

# Lines 1 to 3: dim 64, 4 layers, 4 heads, 2 key-value heads, width of an expert 96, 8 experts.
MOE = '[model]\narchitecture = "moe"\npreset = "debug-moe"\n'

EXPERTS = [
    Wrong(
        "preset of another architecture",
        '[model]\narchitecture = "moe"\npreset = "llama3-8b"\n',
        ['x.toml:3: model.preset = "llama3-8b"'],
    ),
    Wrong(
        "ranges of experts",
        MOE
        + "experts = 0\nexperts_per_token = 0\nrouter_scale = 0\nbias_rate = 2\n"
        + "balance_loss = -1\n[mesh]\nep = 0\n",
        [
            "x.toml:4: model.experts = 0",
            "x.toml:5: model.experts_per_token = 0",
            "x.toml:6: model.router_scale = 0.0",
            "x.toml:7: model.bias_rate = 2.0",
            "x.toml:8: model.balance_loss = -1.0",
            "x.toml:10: mesh.ep = 0",
        ],
    ),
    Wrong(
        "gradients of experts in bfloat16",
        MOE + '[precision]\nreduce = "bfloat16"\n[mesh]\ndp_shard = 2\n',
        ['x.toml:5: precision.reduce = "bfloat16"'],
    ),
    Wrong(
        "float8, sizes of experts",
        MOE
        + "expert_ffn = 40\nshared_ffn = 80\n[mesh]\ntp = 2\n"
        + '[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n',
        [
            'x.toml:10: precision.matmul = "float8"',
            'x.toml:10: precision.matmul = "float8"',
        ],
    ),
    Wrong("groups of experts", MOE + "expert_groups = 3\n", ["x.toml:4: model.expert_groups = 3"]),
    Wrong(
        "groups of a token",
        MOE + "expert_groups = 2\ngroups_per_token = 3\n",
        ["x.toml:5: model.groups_per_token = 3"],
    ),
    Wrong(
        "experts of a token",
        MOE + "experts_per_token = 9\n",
        ["x.toml:4: model.experts_per_token = 9"],
    ),
    Wrong(
        "experts in the groups of a token",
        MOE + "expert_groups = 4\ngroups_per_token = 2\nexperts_per_token = 5\n",
        ["x.toml:6: model.experts_per_token = 5"],
    ),
    Wrong(
        "no layer with experts",
        MOE + "moe_every = 5\ndense_layers = 4\n",
        ["x.toml:5: model.dense_layers = 4"],
    ),
    Wrong(
        "a router that learns nothing",
        MOE + "experts_per_token = 1\n",
        ["x.toml:4: model.renormalise = true"],
    ),
    Wrong("a rate without a bias", MOE + "bias_rate = 0.5\n", ["x.toml:4: model.bias_rate = 0.5"]),
    Wrong("ep, ranks", MOE + "[mesh]\nep = 4\ndp_shard = 2\n", ["x.toml:5: mesh.ep = 4"]),
    Wrong(
        "ep of a dense model", TINY + "[mesh]\nep = 2\ndp_shard = 2\n", ["x.toml:4: mesh.ep = 2"]
    ),
    Wrong(
        "ep, experts",
        MOE + "experts = 6\n[mesh]\nep = 4\ndp_shard = 4\n",
        ["x.toml:6: mesh.ep = 4"],
    ),
    Wrong(
        "experts without sequence parallelism",
        MOE + "[mesh]\ntp = 2\n[parallel]\nsequence_parallel = false\n",
        ["x.toml:7: parallel.sequence_parallel = false"],
    ),
    Wrong(
        "experts in uneven shards",
        MOE + "expert_ffn = 50\n[mesh]\ndp_shard = 2\ntp = 2\nep = 1\n",
        ["x.toml:8: mesh.ep = 1"],
    ),
    Wrong(
        "experts in uneven shards on every ep",
        MOE + "[mesh]\ndp_shard = 5\n[data]\nglobal_batch = 10\n",
        ["x.toml:5: mesh.ep = 1"],
    ),
    Wrong(
        "tp, shared expert", MOE + "shared_ffn = 30\n[mesh]\ntp = 4\n", ["x.toml:6: mesh.tp = 4"]
    ),
    Wrong(
        "compiled experts, results of single operators",
        MOE + '[compile]\nenabled = true\n[memory]\nactivation_checkpoint = "selective"\n',
        ["x.toml:5: compile.enabled = true"],
    ),
    Wrong(
        "compiled experts, async tp",
        MOE + "[mesh]\ntp = 2\n[compile]\nenabled = true\n[parallel]\nasync_tp = true\n",
        ["x.toml:9: parallel.async_tp = true"],
    ),
]
