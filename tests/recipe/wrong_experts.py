"""Models with experts, and layouts of experts, that are refused."""

from tests.recipe.wrong import TINY, Wrong

# Lines 1 to 3: dim 64, 4 layers, 4 heads, 2 key-value heads, width of an expert 96, 8 experts.
MOE = '[model]\narchitecture = "moe"\npreset = "debug-moe"\n'
# Lines 1 to 3: 4 heads of 24, of which 8 are rotated; latents of 32 and 24; values of 20.
LATENTS = '[model]\narchitecture = "deepseek"\npreset = "debug-deepseek"\n'

# Lines 1 to 3: dim 64, width of an expert 48, 8 experts.
GPT_OSS = '[model]\narchitecture = "gpt_oss"\npreset = "debug-gpt-oss"\n'

EXPERTS = [
    Wrong("more experts of a token than experts, gpt-oss", GPT_OSS + "experts_per_token = 9\n"),
    Wrong("a router of gpt-oss that learns nothing", GPT_OSS + "experts_per_token = 1\n"),
    Wrong(
        "float8, experts of gpt-oss",
        GPT_OSS + 'ffn = 40\n[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n',
    ),
    Wrong("fewer keys than heads, with latents", LATENTS + "n_kv_heads = 2\n"),
    Wrong("a factor of scores without YaRN", LATENTS + "rope_score_mscale = 0.707\n"),
    Wrong("a coefficient without multi-token prediction", LATENTS + "mtp_loss = 0.1\n"),
    Wrong(
        "ranges of multi-token prediction",
        LATENTS + "mtp_layers = 17\nmtp_loss = 0\n",
    ),
    Wrong(
        "multi-token prediction beyond the sample",
        LATENTS + "mtp_layers = 8\n[data]\nseq_len = 8\n",
    ),
    Wrong("parts wider than a head", LATENTS + "rope_dim = 24\nvalue_dim = 25\n"),
    Wrong(
        "float8, sizes of latents",
        LATENTS
        + "query_rank = 40\n[mesh]\ntp = 2\n"
        + '[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n',
    ),
    Wrong(
        "preset of another architecture", '[model]\narchitecture = "moe"\npreset = "llama3-8b"\n'
    ),
    Wrong(
        "ranges of experts",
        MOE
        + "experts = 0\nexperts_per_token = 0\nrouter_scale = 0\nbias_rate = 2\n"
        + "balance_loss = -1\n[mesh]\nep = 0\n",
    ),
    Wrong(
        "gradients of experts in bfloat16",
        MOE + '[precision]\nreduce = "bfloat16"\n[mesh]\ndp_shard = 2\n',
    ),
    Wrong(
        "float8, sizes of experts",
        MOE
        + "expert_ffn = 40\nshared_ffn = 80\n[mesh]\ntp = 2\n"
        + '[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n',
    ),
    Wrong("groups of experts", MOE + "expert_groups = 3\n"),
    Wrong("groups of a token", MOE + "expert_groups = 2\ngroups_per_token = 3\n"),
    Wrong("experts of a token", MOE + "experts_per_token = 9\n"),
    Wrong(
        "experts in the groups of a token",
        MOE + "expert_groups = 4\ngroups_per_token = 2\nexperts_per_token = 5\n",
    ),
    Wrong("no layer with experts", MOE + "moe_every = 5\ndense_layers = 4\n"),
    Wrong("a router that learns nothing", MOE + "experts_per_token = 1\n"),
    Wrong("a rate without a bias", MOE + "bias_rate = 0.5\n"),
    Wrong("a choice of one group", MOE + 'group_best = "one"\n'),
    Wrong("ep, ranks", MOE + "[mesh]\nep = 4\ndp_shard = 2\n"),
    Wrong("ep of a dense model", TINY + "[mesh]\nep = 2\ndp_shard = 2\n"),
    Wrong("ep, experts", MOE + "experts = 6\n[mesh]\nep = 4\ndp_shard = 4\n"),
    Wrong(
        "experts without sequence parallelism",
        MOE + "[mesh]\ntp = 2\n[parallel]\nsequence_parallel = false\n",
    ),
    Wrong(
        "experts in uneven shards", MOE + "expert_ffn = 50\n[mesh]\ndp_shard = 2\ntp = 2\nep = 1\n"
    ),
    Wrong(
        "experts in uneven shards on every ep",
        MOE + "[mesh]\ndp_shard = 5\n[data]\nglobal_batch = 10\n",
    ),
    Wrong("a gate without a shared expert", MOE + "shared_gate = true\n"),
    Wrong("tp, shared expert", MOE + "shared_ffn = 30\n[mesh]\ntp = 4\n"),
    Wrong(
        "compiled experts, results of single operators",
        MOE + '[compile]\nenabled = true\n[memory]\nactivation_checkpoint = "selective"\n',
    ),
    Wrong(
        "compiled experts, async tp",
        MOE + "[mesh]\ntp = 2\n[compile]\nenabled = true\n[parallel]\nasync_tp = true\n",
    ),
]
