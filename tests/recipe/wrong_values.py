"""Recipes that can be read but break a rule, alone or several at once."""

from wrong import PRESETS, TINY, Wrong, shape

MODEL = [
    Wrong(
        "no model",
        "[run]\nsteps = 1\n",
        [f"x.toml: model lacks dim, n_layers, n_heads, n_kv_heads, ffn, vocab; give them, or a preset: {PRESETS}"],
    ),
    Wrong(
        "model lacks",
        "[run]\n[model]\ndim = 64\nn_layers = 2\nn_heads = 2\nvocab = 256\n",
        [f"x.toml:2: model lacks n_kv_heads, ffn; give them, or a preset: {PRESETS}"],
    ),
    Wrong(
        "unknown preset",
        '[model]\npreset = "llama3-9b"\n',
        [f'x.toml:2: unknown model.preset = "llama3-9b"; did you mean "llama3-8b"? The presets are {PRESETS}'],
    ),
    Wrong(
        "heads",
        shape(n_heads=12),
        ["x.toml:4: model.n_heads = 12 must divide model.dim = 64 (x.toml:2); use 1, 2, 4, 8, 16 or 32"],
    ),
    Wrong(
        "odd heads",
        shape(dim=60, n_heads=4, n_kv_heads=4),
        [
            "x.toml:4: model.n_heads = 4 gives heads of 15, an odd size that cannot be rotated, with model.dim "
            "= 60 (x.toml:2); "
            "use 1, 2, 3, 5, 6, 10, 15 or 30"
        ],
    ),
    Wrong(
        "odd dim",
        shape(dim=63, n_heads=1, n_kv_heads=1),
        [
            "x.toml:4: model.n_heads = 1 gives heads of 63, an odd size that cannot be rotated, with model.dim "
            "= 63 (x.toml:2); "
            "use an even model.dim"
        ],
    ),
    Wrong(
        "kv heads",
        shape(n_kv_heads=3),
        ["x.toml:5: model.n_kv_heads = 3 must divide model.n_heads = 4 (x.toml:4); use 1, 2 or 4"],
    ),
    Wrong("no heads", shape(n_heads=0), ["x.toml:4: model.n_heads = 0 must be at least 1"]),
    Wrong(
        "small vocab",
        shape(vocab=255),
        ["x.toml:7: model.vocab = 255 must be at least 256: the tokens of the data are bytes"],
    ),
    Wrong(
        "preset too small",
        TINY + "[mesh]\npp = 5\n",
        [
            "x.toml:4: mesh.pp = 5 is more than model.n_layers = 4 (preset debug-tiny): a stage needs a layer; "
            "use at most 4"
        ],
    ),
]

MESH = [
    Wrong(
        "tp, heads from the base",
        {
            "x.toml": 'base = "sub/base.toml"\n\n[mesh]\ntp = 3\n',
            "sub/base.toml": shape(n_heads=32, n_kv_heads=32, ffn=192, vocab=768) + "[data]\nseq_len = 192\n",
        },
        [
            "x.toml:4: mesh.tp = 3 must divide model.n_heads = 32 (sub/base.toml:4); use 1, 2, 4, 8, 16 or 32",
            "x.toml:4: mesh.tp = 3 must divide model.n_kv_heads = 32 (sub/base.toml:5); use 1, 2, 4, 8, 16 or 32",
        ],
    ),
    Wrong(
        "tp, all sizes",
        TINY + "[parallel]\nsequence_parallel = false\n",
        [
            "--set mesh.tp=3: mesh.tp = 3 must divide model.n_heads = 4 (preset debug-tiny); use 1 or 2",
            "--set mesh.tp=3: mesh.tp = 3 must divide model.n_kv_heads = 2 (preset debug-tiny); use 1 or 2",
            "--set mesh.tp=3: mesh.tp = 3 must divide model.ffn = 160 (preset debug-tiny); use 1 or 2",
            "--set mesh.tp=3: mesh.tp = 3 must divide model.vocab = 256 (preset debug-tiny); use 1 or 2",
        ],
        ("mesh.tp=3",),
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
            "x.toml:4: mesh.pp = 0 must be at least 1",
            "x.toml:5: mesh.dp_shard = 0 must be at least 1, or -1 for what is left of the world",
        ],
    ),
    Wrong(
        "cp",
        TINY + "[mesh]\ncp = 2\n",
        ["x.toml:4: mesh.cp = 2 is refused: context parallelism is not in this version; use 1"],
    ),
    Wrong(
        "world",
        TINY + "[data]\nglobal_batch = 4\n[mesh]\npp = 2\ndp_shard = 2\ntp = 2\n",
        [
            "x.toml:6: mesh pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 = 8 processes, but the world has 4; "
            "start 8 processes, or set mesh.dp_shard = 1"
        ],
        world=4,
    ),
    Wrong(
        "world, no way",
        TINY + "[mesh]\ntp = 2\ndp_shard = 1\n",
        [
            "x.toml:4: mesh pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 = 2 processes, but the world has 3; "
            "start 2 processes, or change an axis of [mesh]"
        ],
        world=3,
    ),
    Wrong(
        "world, override",
        TINY + "[mesh]\npp = 2\ndp_shard = 1\n",
        [
            "--set mesh.tp=2: mesh pp 2 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2 = 4 processes, but the "
            "world has 2; "
            "start 4 processes, or change an axis of [mesh]"
        ],
        ("mesh.tp=2",),
        world=2,
    ),
    Wrong(
        "rest of the world",
        TINY + "[mesh]\ndp_shard = -1\npp = 2\ntp = 2\n",
        [
            "x.toml:5: mesh.dp_shard = -1 takes what is left of the world, but 6 processes are no multiple of "
            "pp 2 x dp_replicate 1 x cp 1 x tp 2 = 4; start 4 or 8 processes, or change an axis of [mesh]"
        ],
        world=6,
    ),
    Wrong(
        "zero 0",
        TINY + "[parallel]\nzero = 0\n",
        [
            "x.toml:4: parallel.zero = 0 keeps whole parameters, but mesh.dp_shard = 2 (default, what is left "
            "of 2 processes) "
            "cuts them; use mesh.dp_shard = 1 with mesh.dp_replicate = 2, or parallel.zero = 1 or 3"
        ],
        world=2,
    ),
]

BATCH = [
    Wrong(
        "batch",
        TINY + "[data]\nglobal_batch = 6\nmicro_batch = 2\n[mesh]\ndp_shard = 2\n",
        [
            "x.toml:4: data.global_batch = 6 must be a multiple of data.micro_batch = 2 (x.toml:5) x "
            "mesh.dp_replicate = 1 "
            "(default) x mesh.dp_shard = 2 (x.toml:7), which is 4; use 4 or 8"
        ],
    ),
    Wrong(
        "batch by default",
        TINY + "[mesh]\ndp_shard = 16\n",
        [
            "x.toml:4: data.global_batch = 8 (default) must be a multiple of data.micro_batch = 1 (default) x "
            "mesh.dp_replicate = 1 (default) x mesh.dp_shard = 16, which is 16; use 16"
        ],
    ),
    Wrong(
        "1F1B",
        TINY + "[mesh]\npp = 4\ndp_shard = 2\n[data]\nglobal_batch = 4\n",
        [
            "x.toml:7: data.global_batch = 4 over data.micro_batch = 1 (default) x mesh.dp_replicate = 1 (default) x "
            'mesh.dp_shard = 2 (x.toml:5) gives a rank 2 micro-batches, but parallel.schedule = "1F1B" '
            "(default) needs at least "
            'mesh.pp = 4 (x.toml:4); use data.global_batch = 8, or parallel.schedule = "GPipe", which takes fewer'
        ],
    ),
    Wrong(
        "no batch",
        TINY + "[data]\nglobal_batch = 0\nseq_len = -1\nmicro_batch = 0\n",
        [
            "x.toml:5: data.seq_len = -1 must be at least 1",
            "x.toml:4: data.global_batch = 0 must be at least 1",
            "x.toml:6: data.micro_batch = 0 must be at least 1",
        ],
    ),
]

RUN = [
    Wrong("steps", TINY + "[run]\nsteps = 0\n", ["x.toml:4: run.steps = 0 must be at least 1"]),
    Wrong("seed", TINY + "[run]\nseed = -1\n", ["x.toml:4: run.seed = -1 must be at least 0"]),
    Wrong(
        "name",
        TINY,
        [
            '--set run.name=a/b: run.name = "a/b" names the folder of the run: it must not be empty, . or .., '
            "nor hold / or \\"
        ],
        ("run.name=a/b",),
    ),
    Wrong(
        "no name",
        TINY + '[run]\nname = ""\n',
        ['x.toml:4: run.name = "" names the folder of the run: it must not be empty, . or .., nor hold / or \\'],
    ),
    Wrong(
        "lr",
        TINY + "[optim]\nlr = 0\n",
        [
            "x.toml:4: optim.lr = 0.0 must be above 0",
        ],
    ),
    Wrong(
        "min_lr",
        TINY + "[optim]\nmin_lr = 1e-3\n",
        ["x.toml:4: optim.min_lr = 0.001 must be at most optim.lr = 0.0003 (default)"],
    ),
    Wrong(
        "betas",
        TINY + "[optim]\nbetas = [0.9, 1]\n",
        ["x.toml:4: optim.betas = [0.9, 1.0] must both be at least 0 and below 1"],
    ),
    Wrong(
        "optimizer signs",
        TINY + "[optim]\neps = 0\nweight_decay = -0.1\nclip = -1\nwarmup = -1\nmin_lr = -1\n",
        [
            "x.toml:4: optim.eps = 0.0 must be above 0",
            "x.toml:5: optim.weight_decay = -0.1 must be at least 0",
            "x.toml:6: optim.clip = -1.0 must be at least 0",
            "x.toml:7: optim.warmup = -1 must be at least 0",
            "x.toml:8: optim.min_lr = -1.0 must be at least 0",
        ],
    ),
    Wrong(
        "warmup",
        TINY + "[optim]\nwarmup = 11\n[run]\nsteps = 10\n",
        ["x.toml:4: optim.warmup = 11 must be at most run.steps = 10 (x.toml:6)"],
    ),
    Wrong(
        "decay",
        TINY + "[optim]\nwarmup = 10\ndecay = 10\n",
        ["x.toml:5: optim.decay = 10 must be above optim.warmup = 10 (x.toml:4): the cosine starts there"],
    ),
    Wrong(
        "counts",
        TINY + "[checkpoint]\nkeep = 0\nevery = -1\n[metrics]\nevery = 0\n[validation]\nsteps = 0\nevery = -2\n",
        [
            "x.toml:5: checkpoint.every = -1 must be at least 0",
            "x.toml:4: checkpoint.keep = 0 must be at least 1",
            "x.toml:7: metrics.every = 0 must be at least 1",
            "x.toml:10: validation.every = -2 must be at least 0",
            "x.toml:9: validation.steps = 0 must be at least 1",
        ],
    ),
]

TEXT = TINY + '[data]\nsource = "text"\npath = "t"\nseq_len = 8\n'  # the path is on line 5
DATA = [
    Wrong(
        "text without path",
        TINY + '[data]\nsource = "text"\n',
        ['x.toml:4: data.source = "text" needs data.path: a text file, or a folder of them'],
    ),
    Wrong(
        "python with path",
        TINY + '[data]\npath = "t"\n',
        [
            'x.toml:4: data.path = "t" is not read with data.source = "python" (default); remove it, or use '
            'data.source = "text"'
        ],
    ),
    Wrong(
        "validation without path",
        {"x.toml": TEXT + "[validation]\nevery = 5\n", "t": "some words"},
        [
            'x.toml:8: validation.every = 5 with data.source = "text" (x.toml:4) needs validation.path: '
            "held-out text, a file or "
            "a folder; give it, or use validation.every = 0"
        ],
    ),
    Wrong(
        "validation path for python",
        TINY + '[validation]\npath = "t"\n',
        [
            'x.toml:4: validation.path = "t" is not read with data.source = "python" (default); remove it, or use '
            'data.source = "text"'
        ],
    ),
    Wrong(
        "no such text",
        TEXT,
        [
            'x.toml:5: data.path = "t" does not exist; give a text file or a folder of them, relative to the '
            "working directory"
        ],
    ),
    Wrong(
        "short text",
        {"x.toml": TEXT, "t/a": "1234", "t/b/c": "5678", "t/.hidden": "90", "t/.git/x": "1"},
        [
            'x.toml:5: data.path = "t" holds 8 bytes, and must hold more than data.seq_len = 8; give more text '
            "or shorter samples"
        ],
    ),
    Wrong(
        "empty texts",
        {"x.toml": TEXT, "t/a": "", "t/.b": "some words"},
        ['x.toml:5: data.path = "t" holds no text: no file in it that is not hidden has a byte'],
    ),
    Wrong(
        "no held-out text",
        {"x.toml": TEXT + '[validation]\npath = "v"\n', "t": "some words"},
        [
            'x.toml:8: validation.path = "v" does not exist; give a text file or a folder of them, relative to '
            "the working directory"
        ],
    ),
    Wrong(
        "resume",
        TINY + '[checkpoint]\nresume = "runs/none"\n',
        [
            'x.toml:4: checkpoint.resume = "runs/none" is no folder; use "auto", "none" or the folder of a '
            "checkpoint, relative to "
            "the working directory"
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
            "x.toml:3: mesh.tp = 3 must divide model.n_heads = 32 (y.toml:4); use 1, 2, 4, 8, 16 or 32",
            "x.toml:3: mesh.tp = 3 must divide model.n_kv_heads = 32 (y.toml:5); use 1, 2, 4, 8, 16 or 32",
        ],
        ("mesh.pp=two",),
        world=8,
    ),
    Wrong(
        "a wrong value is blamed once",
        shape(n_heads='"four"', dim=60) + "[mesh]\ntp = 4\n",
        [
            "x.toml:4: 'model.n_heads' must be int, got \"four\"",
            "x.toml:9: mesh.tp = 4 must divide model.n_kv_heads = 2 (x.toml:5); use 1 or 2",
        ],
    ),
    Wrong(
        "a misspelt axis is not a wrong world",
        TINY + "[mesh]\ntps = 2\ndp_shard = 1\n",
        ["x.toml:4: unknown key 'mesh.tps'; did you mean 'tp'?"],
        world=2,
    ),
]


ALL = MODEL + MESH + BATCH + RUN + DATA + SEVERAL
