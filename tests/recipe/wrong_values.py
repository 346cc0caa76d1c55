"""Recipes that can be read but break a rule, alone or several at once."""

import json

from tests.recipe.wrong import HF, MOE_PRESETS, OLMO2_PRESETS, PRESETS, SIZES, TINY, Wrong, shape
from tests.recipe.wrong_data import DATA, RUN
from tests.recipe.wrong_experts import EXPERTS
from tests.recipe.wrong_layouts import LAYOUTS

HF_BIASED = json.dumps(
    SIZES | {"model_type": "llama", "vocab_size": 300, "attention_bias": True, "mlp_bias": True}
)

MODEL = [
    Wrong(
        "no model",
        "[run]\nsteps = 1\n",
        [
            "x.toml: [model] lacks dim, n_layers, n_heads, n_kv_heads, ffn, vocab; set them, or "
            f"use one of the presets {PRESETS}"
        ],
    ),
    Wrong(
        "model lacks",
        "[run]\n[model]\ndim = 64\nn_layers = 2\nn_heads = 2\nvocab = 256\n",
        [f"x.toml:2: [model] lacks n_kv_heads, ffn; set them, or use one of the presets {PRESETS}"],
    ),
    Wrong(
        "unknown preset",
        '[model]\npreset = "llama3-9b"\n',
        [
            f'x.toml:2: model.preset = "llama3-9b" is unknown; the presets are {PRESETS}; with '
            f'model.architecture = "moe" they are {MOE_PRESETS}; with '
            f'model.architecture = "olmo2" they are {OLMO2_PRESETS}'
        ],
    ),
    Wrong(
        "heads",
        shape(n_heads=12),
        [
            "x.toml:4: model.n_heads = 12 must divide model.dim = 64 (x.toml:2); use 1, 2, 4, 8, "
            "16 or 32"
        ],
    ),
    Wrong(
        "odd heads",
        shape(dim=60, n_heads=4, n_kv_heads=4),
        [
            "x.toml:4: model.n_heads = 4 with model.dim = 60 (x.toml:2) makes heads 15 wide, but "
            "RoPE needs an even width; use 1, 2, 3, 5, 6, 10, 15 or 30"
        ],
    ),
    Wrong(
        "odd dim",
        shape(dim=63, n_heads=1, n_kv_heads=1),
        [
            "x.toml:4: model.n_heads = 1 with model.dim = 63 (x.toml:2) makes heads 63 wide, but "
            "RoPE needs an even width; use an even model.dim"
        ],
    ),
    Wrong(
        "kv heads",
        shape(n_kv_heads=3),
        ["x.toml:5: model.n_kv_heads = 3 must divide model.n_heads = 4 (x.toml:4); use 1, 2 or 4"],
    ),
    Wrong("no heads", shape(n_heads=0), ["x.toml:4: model.n_heads = 0 must be from 1 to 65_536"]),
    Wrong(
        "odd head_dim",
        # Heads need not fill dim if their width is given.
        shape(n_heads=12, n_kv_heads=3, head_dim=15),
        [
            "x.toml:8: model.head_dim = 15 must be even, because RoPE rotates its two halves, "
            "and from 2 to 16_384"
        ],
    ),
    Wrong(
        "rope and window",
        TINY
        + "window = -1\nrope_factor = 0.5\nrope_low_freq = 0\n"
        + "rope_high_freq = -1\nrope_context = 0\n",
        [
            "x.toml:4: model.rope_factor = 0.5 must be from 1 to 1_000_000",
            "x.toml:5: model.rope_low_freq = 0.0 must be above 0 and at most 1_000_000",
            "x.toml:6: model.rope_high_freq = -1.0 must be above 0 and at most 1_000_000",
            "x.toml:7: model.rope_context = 0 must be from 1 to 134_217_728",
            "x.toml:3: model.window = -1 must be from 0 to 134_217_728",
        ],
    ),
    Wrong(
        "rope without a middle",
        TINY + "rope_low_freq = 4\n",
        [
            "x.toml:3: model.rope_high_freq = 4.0 (default) must be above model.rope_low_freq = "
            "4.0",
        ],
    ),
    Wrong(
        "small vocab",
        shape(vocab=255),
        ["x.toml:7: model.vocab = 255 must be at least 256: the tokens of the data are bytes"],
    ),
    Wrong(
        "preset too small",
        TINY + "[mesh]\npp = 5\n",
        [
            "x.toml:4: mesh.pp = 5 must be at most model.n_layers = 4 (preset debug-tiny): every "
            "stage needs a layer; use at most 4"
        ],
    ),
    Wrong(
        "no hf folder",
        '[run]\nsteps = 1\n[model]\nhf = "none"\n',
        [
            "x.toml:4: model.hf: none/config.json cannot be read ([Errno 2] No such file or "
            "directory: 'none/config.json'); give a folder in the format of Hugging Face"
        ],
    ),
    Wrong(
        "hf is no JSON",
        {"x.toml": '[model]\nhf = "m"\n', "m/config.json": "hidden_size: 64"},
        [
            "x.toml:2: model.hf: m/config.json cannot be read (Expecting value: line 1 column 1 "
            "(char 0)); give a folder in the format of Hugging Face"
        ],
    ),
    Wrong(
        "hf of another kind",
        {"x.toml": '[model]\nhf = "m"\n', "m/config.json": '{"model_type": "gpt2"}'},
        [
            'x.toml:2: model.hf: m/config.json: model_type = "gpt2" is not supported; it must be '
            "llama, mistral, qwen2, qwen3, mixtral, qwen3_moe or olmo2"
        ],
    ),
    Wrong(
        "hf with experts",
        {"x.toml": '[model]\nhf = "m"\n', "m/config.json": '{"model_type": "mixtral"}'},
        [
            'x.toml:2: model.hf: m/config.json: model_type = "mixtral" needs another architecture; '
            'set model.architecture = "moe"'
        ],
    ),
    Wrong(
        "hf without experts",
        {"x.toml": '[model]\narchitecture = "moe"\nhf = "m"\n', "m/config.json": HF},
        [
            'x.toml:3: model.hf: m/config.json: model_type = "llama" needs another architecture; '
            'set model.architecture = "llama"'
        ],
    ),
    Wrong(
        "hf that does what we do not",
        {"x.toml": TINY, "m/config.json": HF_BIASED},
        [
            f"--set model.hf=m: model.hf: m/config.json: {key} = true is not supported; it must be "
            "false, null or absent"
            for key in ("mlp_bias", "attention_bias")
        ]
        + ["--set model.hf=m: model.hf and model.preset both give a shape; remove one"],
        ("model.hf=m",),
    ),
    Wrong(
        "hf and other first weights",
        {
            "x.toml": '[model]\nhf = "m"\n[checkpoint]\ninit = "c"\n',
            "m/config.json": HF,
            "c/manifest.json": "{}",
        },
        [
            'x.toml:4: checkpoint.init = "c" and model.hf = "m" (x.toml:2) both give the first '
            "weights; remove one"
        ],
    ),
    Wrong(
        "hf and a rule",
        {"x.toml": '[model]\nhf = "m"\n[mesh]\npp = 3\n', "m/config.json": HF},
        [
            "x.toml:4: mesh.pp = 3 must be at most model.n_layers = 2 (config.json of m): every "
            "stage needs a layer; use at most 2"
        ],
    ),
]

MESH = [
    Wrong(
        "tp, heads from the base",
        {
            "x.toml": 'base = "sub/base.toml"\n\n[mesh]\ntp = 3\n',
            "sub/base.toml": shape(n_heads=32, n_kv_heads=32, ffn=192, vocab=768)
            + "[data]\nseq_len = 192\n",
        },
        [
            "x.toml:4: mesh.tp = 3 must divide model.n_heads = 32 (sub/base.toml:4); use 1, 2, "
            "4, 8, 16 or 32",
            "x.toml:4: mesh.tp = 3 and model.n_kv_heads = 32 (sub/base.toml:5): one must divide "
            "the other; use 1, 2, 4, 8, 16 or 32",
        ],
    ),
    Wrong(
        "tp, all sizes",
        TINY + "[parallel]\nsequence_parallel = false\n",
        [
            "--set mesh.tp=3: mesh.tp = 3 must divide model.n_heads = 4 (preset debug-tiny); use "
            "1, 2 or 4",
            "--set mesh.tp=3: mesh.tp = 3 and model.n_kv_heads = 2 (preset debug-tiny): one must "
            "divide the other; use 1, 2 or 4",
            "--set mesh.tp=3: mesh.tp = 3 must divide model.ffn = 160 (preset debug-tiny); use "
            "1, 2 or 4",
        ],
        ("mesh.tp=3",),
    ),
    Wrong(
        "tp, a vocabulary too small",
        shape(dim=128, n_heads=64, n_kv_heads=64, ffn=192, vocab=260) + "[mesh]\ntp = 64\n",
        [
            "x.toml:9: mesh.tp = 64 cuts model.vocab = 260 (x.toml:7) into 52 chunks of 5, too "
            "few for all ranks; use a smaller mesh.tp, or model.vocab = 320"
        ],
    ),
    Wrong(
        "tp, uneven vocabulary over uneven columns",
        TINY + "vocab = 257\n[mesh]\ntp = 2\ncp = 3\n[data]\nseq_len = 240\n",
        [
            "x.toml:5: mesh.tp = 2 does not divide model.vocab = 257 (x.toml:3), so model.dim = "
            "64 (preset debug-tiny) must be a multiple of mesh.dp_shard = 1 (default) x mesh.cp "
            "= 3 (x.toml:6), the number of shards; change one of them, or use model.vocab = 258"
        ],
    ),
    Wrong(
        "tp, sequence",
        TINY + "[data]\nseq_len = 33\n[mesh]\ntp = 2\n",
        [
            "x.toml:4: data.seq_len = 33 must be a multiple of mesh.tp = 2 (x.toml:6) with "
            "parallel.sequence_parallel = true "
            "(default); use 32 or 34, or parallel.sequence_parallel = false"
        ],
    ),
    Wrong(
        "axis of zero",
        TINY + "[mesh]\npp = 0\ndp_shard = 0\n",
        [
            "x.toml:4: mesh.pp = 0 must be from 1 to 1_048_576",
            "x.toml:5: mesh.dp_shard = 0 must be from 1 to 1_048_576, or -1 to use all remaining "
            "processes",
        ],
    ),
    Wrong(
        "world",
        TINY + "[data]\nglobal_batch = 4\n[mesh]\npp = 2\ndp_shard = 2\ntp = 2\n",
        [
            "x.toml:7: mesh pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 = 8 processes, but "
            "the world has 4; start 8 processes, or change an axis of [mesh]"
        ],
        world=4,
    ),
    Wrong(
        "world, override",
        TINY + "[mesh]\npp = 2\ndp_shard = 1\n",
        [
            "x.toml:5: mesh pp 2 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 = 4 processes, but "
            "the world has 2; start 4 processes, or change an axis of [mesh]"
        ],
        ("mesh.tp=2",),
        world=2,
    ),
    Wrong(
        "rest of the world",
        TINY + "[mesh]\ndp_shard = -1\npp = 2\ntp = 2\n",
        [
            "x.toml:4: mesh pp 2 x dp_replicate 1 x cp 1 x tp 2 = 4 processes, but the world has "
            "6; start 4 or 8 processes, or change an axis of [mesh]"
        ],
        world=6,
    ),
    Wrong(
        "zero 0",
        TINY + "[parallel]\nzero = 0\n",
        [
            "x.toml:4: parallel.zero = 0 keeps whole parameters, but mesh.dp_shard = 2 (default, "
            "to fill 2 processes) shards them; use mesh.dp_shard = 1 with mesh.dp_replicate = 2, "
            "or parallel.zero = 1 or 3"
        ],
        world=2,
    ),
]

BATCH = [
    Wrong(
        "batch",
        TINY + "[data]\nglobal_batch = 6\nmicro_batch = 2\n[mesh]\ndp_shard = 2\n",
        [
            "x.toml:4: data.global_batch = 6 must be a multiple of data.micro_batch = 2 "
            "(x.toml:5) x mesh.dp_replicate = 1 (default) x mesh.dp_shard = 2 (x.toml:7), which "
            "is 4; use 4 or 8"
        ],
    ),
    Wrong(
        "batch by default",
        TINY + "[mesh]\ndp_shard = 16\n",
        [
            "x.toml:4: data.global_batch = 8 (default) must be a multiple of data.micro_batch = "
            "1 (default) x mesh.dp_replicate = 1 (default) x mesh.dp_shard = 16, which is 16; "
            "use 16"
        ],
    ),
    Wrong(
        "1F1B",
        TINY + "[mesh]\npp = 4\ndp_shard = 2\n[data]\nglobal_batch = 4\n",
        [
            "x.toml:7: data.global_batch = 4 over data.micro_batch = 1 (default) x "
            "mesh.dp_replicate = 1 (default) x mesh.dp_shard = 2 (x.toml:5) gives a rank 2 "
            'micro-batches, but parallel.schedule = "1F1B" (default) needs at least mesh.pp = 4 '
            '(x.toml:4); use data.global_batch = 8, or parallel.schedule = "GPipe", which '
            "accepts fewer"
        ],
    ),
    Wrong(
        "no batch",
        TINY + "[data]\nglobal_batch = 0\nseq_len = -1\nmicro_batch = 0\n",
        [
            "x.toml:5: data.seq_len = -1 must be from 1 to 134_217_728",
            "x.toml:4: data.global_batch = 0 must be from 1 to 1_073_741_824",
            "x.toml:6: data.micro_batch = 0 must be from 1 to 1_048_576",
        ],
    ),
]

SEVERAL = [
    Wrong(
        "one of each",
        {
            "x.toml": 'base = "y.toml"\n[mesh]\ntp = 3\n[parallel]\nshedule = "1F1B"\n',
            "y.toml": shape(n_heads=32, n_kv_heads=32, ffn=192, vocab=768)
            + '[run]\nsteps = "9"\n[data]\nseq_len = 192\n',
        },
        [
            "x.toml:5: unknown key 'parallel.shedule'; did you mean 'schedule'?",
            "y.toml:9: 'run.steps' must be int, got \"9\"",
            "--set mesh.pp=two: 'mesh.pp' must be int, got \"two\"",
            "x.toml:3: mesh.tp = 3 must divide model.n_heads = 32 (y.toml:4); use 1, 2, 4, 8, 16 "
            "or 32",
            "x.toml:3: mesh.tp = 3 and model.n_kv_heads = 32 (y.toml:5): one must divide the "
            "other; use 1, 2, 4, 8, 16 or 32",
        ],
        ("mesh.pp=two",),
        world=8,
    ),
    Wrong(
        "a wrong value is blamed once",
        shape(n_heads='"four"', dim=60, ffn=162) + "[mesh]\ntp = 4\n",
        [
            "x.toml:4: 'model.n_heads' must be int, got \"four\"",
            "x.toml:9: mesh.tp = 4 must divide model.ffn = 162 (x.toml:6); use 1 or 2",
        ],
    ),
    Wrong(
        "a misspelt axis is not a wrong world",
        TINY + "[mesh]\ntps = 2\ndp_shard = 1\n",
        ["x.toml:4: unknown key 'mesh.tps'; did you mean 'tp'?"],
        world=2,
    ),
]


ALL = MODEL + MESH + LAYOUTS + EXPERTS + BATCH + RUN + DATA + SEVERAL
