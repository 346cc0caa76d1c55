"""Layouts that cannot be run: context parallelism, pipeline schedules and cuts, zero, precision."""

from tests.recipe.wrong import TINY, Wrong

LAYOUTS = [
    Wrong("no cp", TINY + "[mesh]\ncp = 0\n"),
    Wrong("cp, sequence", TINY + "[data]\nseq_len = 30\n[mesh]\ncp = 4\n"),
    Wrong("cp and tp, sequence", TINY + "[data]\nseq_len = 10\n[mesh]\ncp = 3\ntp = 2\n"),
    Wrong(
        "cp, heads of ulysses",
        TINY + '[mesh]\ncp = 3\n[parallel]\ncp_method = "ulysses"\n[data]\nseq_len = 240\n',
    ),
    Wrong(
        "cp, heads of ulysses over tp",
        TINY + '[mesh]\ncp = 2\ntp = 2\n[parallel]\ncp_method = "ulysses"\n',
    ),
    Wrong(
        "world too large",
        TINY
        + "[mesh]\ndp_replicate = 1_048_576\ndp_shard = 32\n"
        + "[data]\nglobal_batch = 33_554_432\n",
    ),
    Wrong("virtual stages of 1F1B", TINY + "[mesh]\npp = 2\n[parallel]\nvirtual_stages = 2\n"),
    Wrong(
        "one virtual stage interleaved",
        TINY + '[mesh]\npp = 2\n[parallel]\nvirtual_stages = 1\nschedule = "Interleaved1F1B"\n',
    ),
    Wrong("no virtual stage", TINY + "[parallel]\nvirtual_stages = 0\n"),
    Wrong("no block of a unit", TINY + "[parallel]\nfsdp_blocks = 0\n"),
    Wrong(
        "more virtual stages than layers",
        TINY + '[mesh]\npp = 4\n[parallel]\nschedule = "Interleaved1F1B"\n',
    ),
    Wrong("cut of too few stages", TINY + "[mesh]\npp = 4\n[parallel]\nstages = [2, 2]\n"),
    Wrong("cut of an empty stage", TINY + "[mesh]\npp = 2\n[parallel]\nstages = [4, 0]\n"),
    Wrong("cut of too many layers", TINY + "[mesh]\npp = 2\n[parallel]\nstages = [3, 2]\n"),
    Wrong(
        "uneven rounds",
        TINY
        + '[mesh]\npp = 2\n[parallel]\nschedule = "Interleaved1F1B"\n[data]\nglobal_batch = 5\n',
    ),
    Wrong(
        "virtual stages of a V",
        TINY + '[mesh]\npp = 2\n[parallel]\nvirtual_stages = 1\nschedule = "ZBVZeroBubble"\n',
    ),
    Wrong(
        "too few micro-batches for DualPipeV",
        TINY + '[mesh]\npp = 2\n[parallel]\nschedule = "DualPipeV"\n[data]\nglobal_batch = 3\n',
    ),
    Wrong("csv without a file", TINY + '[mesh]\npp = 2\n[parallel]\nschedule = "csv"\n'),
    Wrong("a file without csv", TINY + '[parallel]\nschedule_csv = "own.csv"\n'),
    Wrong(
        "csv file that is not there",
        TINY + '[mesh]\npp = 2\n[parallel]\nschedule = "csv"\nschedule_csv = "own.csv"\n',
    ),
    Wrong("zero 2 with a pipeline", TINY + "[mesh]\npp = 2\n[parallel]\nzero = 2\n"),
    Wrong("compute wider than params", TINY + '[precision]\ncompute = "float64"\n'),
    Wrong("proof in bfloat16", TINY + '[precision]\nparams = "float64"\ncompute = "bfloat16"\n'),
    Wrong("float8 in float32", TINY + '[precision]\nmatmul = "float8"\n'),
    Wrong(
        "float8, sizes of products",
        TINY
        + "n_heads = 3\nn_kv_heads = 1\nhead_dim = 24\nffn = 100\ndim = 72\n[precision]\n"
        + 'compute = "bfloat16"\nmatmul = "float8"\n',
    ),
    Wrong(
        "float8, sizes over tp",
        TINY + '[mesh]\ntp = 4\n[precision]\ncompute = "bfloat16"\nmatmul = "float8"\n',
    ),
    Wrong(
        "float8 and async_tp",
        TINY
        + "[mesh]\ntp = 2\n[compile]\nenabled = true\n[parallel]\nasync_tp = true\n[precision]\n"
        + 'compute = "bfloat16"\nmatmul = "float8"\n',
    ),
    Wrong(
        "proof with gradients in bfloat16",
        TINY + '[precision]\nparams = "float64"\nreduce = "bfloat16"\n[mesh]\ndp_shard = 2\n',
    ),
    Wrong(
        "proof with gradients in float32",
        TINY + '[precision]\nparams = "float64"\nreduce = "float32"\n',
    ),
    Wrong(
        "gradients in bfloat16 of replicas",
        TINY
        + '[precision]\nreduce = "bfloat16"\n[mesh]\ndp_replicate = 2\ndp_shard = 1\n'
        + "[parallel]\nzero = 0\n",
    ),
    Wrong(
        "gradients in bfloat16 without shards",
        TINY + '[precision]\nreduce = "bfloat16"\n[mesh]\npp = 2\ndp_replicate = 2\ndp_shard = 1\n',
    ),
    Wrong("half precision", TINY + '[precision]\ncompute = "float16"\n'),
    Wrong("checkpointing of another name", TINY + '[memory]\nactivation_checkpoint = "op"\n'),
    *(
        Wrong(
            f"checkpointing of {number} blocks",
            TINY + f'[memory]\nactivation_checkpoint = "every {number} blocks"\n',
        )
        for number in ("0", "two", "-1", "1.5", "10001")
    ),
    Wrong(
        "checkpointing of all stages, and more",
        TINY + '[mesh]\npp = 2\n[memory]\nactivation_checkpoint = "full in the first 2 stages"\n',
    ),
    Wrong(
        "checkpointing of a stage without a pipeline",
        TINY + '[memory]\nactivation_checkpoint = "every 2 blocks in the first 1 stages"\n',
    ),
    Wrong(
        "compiled backward in two halves",
        TINY
        + '[mesh]\npp = 2\n[parallel]\nschedule = "ZBVZeroBubble"\n[compile]\nenabled = true\n',
    ),
    Wrong("kernels of attention in float32", TINY + '[parallel]\nattention_kernel = "flash3"\n'),
    Wrong("async tp without a compiler, tp", TINY + "[parallel]\nasync_tp = true\n"),
    Wrong(
        "async tp without sequence parallelism",
        TINY
        + "[mesh]\ntp = 2\n[compile]\nenabled = true\n"
        + "[parallel]\nasync_tp = true\nsequence_parallel = false\n",
    ),
    Wrong(
        "globs that match nothing", TINY + '[optim]\ntrain = ["last.*", "<mesh.tp>", "*.lora"]\n'
    ),
    Wrong(
        "a stage that trains nothing", TINY + '[mesh]\npp = 2\n[optim]\ntrain = ["blocks.1.*"]\n'
    ),
]
