"""Recipes whose run, optimizer or data breaks a rule."""

from tests.recipe.wrong import HF, TINY, Wrong, token_files

RUN = [
    Wrong("steps", TINY + "[run]\nsteps = 0\n", ["x.toml:4: run.steps = 0"]),
    Wrong("seed", TINY + "[run]\nseed = -1\n", ["x.toml:4: run.seed = -1"]),
    Wrong("name", TINY, ['--set run.name=a/b: run.name = "a/b"'], ("run.name=a/b",)),
    Wrong("no name", TINY + '[run]\nname = ""\n', ['x.toml:4: run.name = ""']),
    Wrong("lr", TINY + "[optim]\nlr = 0\n", ["x.toml:4: optim.lr = 0.0"]),
    Wrong("min_lr", TINY + "[optim]\nmin_lr = 1e-3\n", ["x.toml:4: optim.min_lr = 0.001"]),
    Wrong("betas", TINY + "[optim]\nbetas = [0.9, 1]\n", ["x.toml:4: optim.betas = [0.9, 1.0]"]),
    Wrong(
        "optimizer signs",
        TINY + "[optim]\neps = 0\nweight_decay = -0.1\nclip = -1\nwarmup = -1\nmin_lr = -1\n",
        [
            "x.toml:4: optim.eps = 0.0",
            "x.toml:5: optim.weight_decay = -0.1",
            "x.toml:6: optim.clip = -1.0",
            "x.toml:7: optim.warmup = -1",
            "x.toml:8: optim.min_lr = -1.0",
        ],
    ),
    Wrong(
        "warmup",
        TINY + "[optim]\nwarmup = 11\n[run]\nsteps = 10\n",
        ["x.toml:4: optim.warmup = 11"],
    ),
    Wrong("decay", TINY + "[optim]\nwarmup = 10\ndecay = 10\n", ["x.toml:5: optim.decay = 10"]),
    Wrong(
        "constant with decay",
        TINY + '[optim]\nschedule = "constant"\ndecay = 10\nmin_lr = 1e-5\n',
        ["x.toml:5: optim.decay = 10", "x.toml:6: optim.min_lr = 1e-05"],
    ),
    Wrong(
        "decay_steps without wsd",
        TINY + "[optim]\ndecay_steps = 10\n",
        ["x.toml:4: optim.decay_steps = 10"],
    ),
    Wrong(
        "no decay_steps",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 0\n',
        ["x.toml:5: optim.decay_steps = 0"],
    ),
    Wrong(
        "wsd beyond decay",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 16\nwarmup = 5\ndecay = 20\n',
        ["x.toml:5: optim.decay_steps = 16"],
    ),
    Wrong(
        "wsd beyond the run",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 1\nwarmup = 20\n[run]\nsteps = 20\n',
        ["x.toml:5: optim.decay_steps = 1"],
    ),
    Wrong(
        "wsd before its warmup ends",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 5\nwarmup = 20\ndecay = 10\n',
        ["x.toml:7: optim.decay = 10"],
    ),
    Wrong(
        "wsd whose end is its warmup's",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 5\nwarmup = 20\ndecay = 20\n',
        ["x.toml:7: optim.decay = 20"],
    ),
    Wrong(
        "keys of Muon without it",
        TINY
        + "[optim]\nmatrix_lr = 1e-3\nmomentum = 0.9\nnesterov = false\nnewton_schulz_steps = 4\n"
        + 'matrices = ["last.*"]\nlr_scale = "original"\nnewton_schulz = [1, 2, 3]\n'
        + 'newton_schulz_dtype = "float32"\n',
        [
            "x.toml:8: optim.matrices",
            "x.toml:4: optim.matrix_lr = 0.001",
            "x.toml:9: optim.lr_scale",
            "x.toml:5: optim.momentum",
            "x.toml:6: optim.nesterov",
            "x.toml:10: optim.newton_schulz",
            "x.toml:7: optim.newton_schulz_steps",
            "x.toml:11: optim.newton_schulz_dtype",
        ],
    ),
    Wrong(
        "numbers of Muon",
        TINY
        + '[optim]\nname = "muon"\nmomentum = 1\nnewton_schulz = [1, 2, 300]\n'
        + "newton_schulz_steps = 100\nmatrix_lr = 0\n",
        [
            "x.toml:8: optim.matrix_lr = 0.0",
            "x.toml:5: optim.momentum = 1.0",
            "x.toml:6: optim.newton_schulz",
            "x.toml:7: optim.newton_schulz_steps = 100",
        ],
    ),
    Wrong(
        "groups of nothing that trains",
        TINY
        + '[optim]\ntrain = ["blocks.*"]\n[[optim.groups]]\ntrain = ["last.*"]\nlr_factor = 2\n',
        ["x.toml:5: optim.groups"],
    ),
    Wrong(
        "a group behind another",
        TINY + '[[optim.groups]]\ntrain = ["*"]\n[[optim.groups]]\ntrain = ["blocks.0.*"]\n',
        ["x.toml:3: optim.groups"],
    ),
    *(
        Wrong(
            f"a group with {line}",
            TINY + f'[[optim.groups]]\ntrain = ["*"]\n{line}\n',
            ["x.toml:3: optim.groups = "],
        )
        for line in ("lr_factor = 0", "lr_factor = 1001", "weight_decay = -1", "weight_decay = 11")
    ),
    *(
        Wrong(
            f"a group of {table}",
            TINY + f"[optim]\ngroups = [{table}]\n",
            ["x.toml:4: 'optim.groups'"],
        )
        for table in (
            "{ lr_factor = 2 }",
            '{ train = "*" }',
            '{ train = ["*"], lr = 2 }',
            '{ train = ["*"], lr_factor = "2" }',
        )
    ),
    Wrong(
        "globs of Muon",
        TINY + '[optim]\nname = "muon"\nmatrices = ["blocks.*.attn.*", "*norm*"]\n',
        ["x.toml:5: optim.matrices"],
    ),
    *(
        Wrong(
            f"traced steps {steps}",
            TINY + f"[metrics]\ntimeline_steps = {steps}\n",
            [f"x.toml:4: metrics.timeline_steps = {steps}"],
        )
        for steps in ("[0, 3]", "[4, 3]", "[1, 101]", "[1000000000, 1000000001]")
    ),
    Wrong(
        "too many profiled steps",
        TINY + "[metrics]\nprofile_steps = [1, 21]\n",
        ["x.toml:4: metrics.profile_steps = [1, 21]"],
    ),
    Wrong(
        "a profiled rank twice",
        TINY + "[metrics]\nprofile_steps = [1, 2]\nprofile_ranks = [0, 0]\n",
        ["x.toml:5: metrics.profile_ranks = [0, 0]"],
    ),
    Wrong(
        "a profiled rank that is none",
        TINY + "[metrics]\nprofile_steps = [1, 2]\nprofile_ranks = [0, 8]\n",
        ["x.toml:5: metrics.profile_ranks = [0, 8]"],
    ),
    Wrong(
        "ranks without a profile",
        TINY + "[metrics]\nprofile_ranks = [1]\n",
        ["x.toml:4: metrics.profile_ranks = [1]"],
    ),
    Wrong(
        "a step that is traced and profiled",
        TINY + "[metrics]\nprofile_steps = [3, 4]\ntimeline_steps = [4, 5]\n",
        ["x.toml:4: metrics.profile_steps = [3, 4]"],
    ),
    Wrong(
        "digests of one data-parallel rank",
        TINY + "[reliability]\ndigest_every = 10\n[mesh]\ndp_shard = 1\n",
        ["x.toml:4: reliability.digest_every = 10"],
    ),
    *(
        Wrong(
            f"straggler factor {factor}",
            TINY + f"[reliability]\nstraggler_factor = {factor}\nstraggler_window = 2\n",
            [
                f"x.toml:4: reliability.straggler_factor = {factor}",
                "x.toml:5: reliability.straggler_window = 2",
            ],
        )
        for factor in ("1.05", "-1.0", "101.0")
    ),
    *(
        Wrong(
            f"{key} with {then}",
            TINY + f"[reliability]\non_bad_step = {then}\n{key} = 7\n",
            [f"x.toml:5: reliability.{key} = 7"],
        )
        for key, then in (("max_bad_steps", '"rollback"'), ("max_rollbacks", '"skip"'))
    ),
    Wrong(
        "rollback without checkpoints",
        TINY
        + '[reliability]\non_bad_step = "rollback"\n[checkpoint]\nevery = 0\nevery_minutes = 0.0\n',
        ['x.toml:4: reliability.on_bad_step = "rollback"'],
    ),
    Wrong(
        "a window without spikes",
        TINY + "[reliability]\nspike_window = 64\n",
        ["x.toml:4: reliability.spike_window = 64"],
    ),
    *(
        Wrong(
            f"spike sigma {sigma}",
            TINY + f"[reliability]\nspike_sigma = {sigma}\nspike_window = 7\n",
            [
                f"x.toml:4: reliability.spike_sigma = {sigma}",
                "x.toml:5: reliability.spike_window = 7",
            ],
        )
        for sigma in ("1.9", "-6.0", "1001.0")
    ),
    Wrong(
        "counts",
        TINY
        + "[checkpoint]\nkeep = 0\nevery = -1\n[metrics]\nevery = 0\n"
        + "[validation]\nsteps = 0\nevery = -2\n",
        [
            "x.toml:5: checkpoint.every = -1",
            "x.toml:4: checkpoint.keep = 0",
            "x.toml:7: metrics.every = 0",
            "x.toml:10: validation.every = -2",
            "x.toml:9: validation.steps = 0",
        ],
    ),
]

TEXT = TINY + '[data]\nsource = "text"\npath = "t"\nseq_len = 8\n'  # the path is on line 5
TOKENS = TEXT.replace('"text"', '"tokens"')
WHOLE = token_files("t")
SOURCES = """\
[[data.sources]]
path = "t"
weight = 1
[[data.sources]]
path = "u"
weight = 0.5
"""


DATA = [
    Wrong(
        "a sequence beyond every text",
        TINY + '[data]\nsource = "python"\nseq_len = 200000000\n',
        ["x.toml:5: data.seq_len = 200000000"],
    ),
    Wrong(
        "text without path", TINY + '[data]\nsource = "text"\n', ['x.toml:4: data.source = "text"']
    ),
    Wrong(
        "JSONL without path",
        TINY + '[data]\nsource = "jsonl"\n',
        ['x.toml:4: data.source = "jsonl"'],
    ),
    Wrong(
        "tokens without path",
        TINY + '[data]\nsource = "tokens"\n',
        ['x.toml:4: data.source = "tokens"'],
    ),
    Wrong(
        "field of text",
        {"x.toml": TEXT + 'field = "body"\n', "t": "some words"},
        ['x.toml:7: data.field = "body"'],
    ),
    Wrong("python with path", TINY + '[data]\npath = "t"\n', ['x.toml:4: data.path = "t"']),
    Wrong(
        "validation without path",
        {"x.toml": TEXT + "[validation]\nevery = 5\n", "t": "some words"},
        ["x.toml:8: validation.every = 5"],
    ),
    Wrong(
        "validation of tokens without path",
        WHOLE | {"x.toml": TOKENS + "[validation]\nevery = 5\n"},
        ["x.toml:8: validation.every = 5"],
    ),
    Wrong(
        "no token files", {"x.toml": TOKENS, "t/tokens.bin": "12"}, ['x.toml:5: data.path = "t"']
    ),
    Wrong("a file for token files", {"x.toml": TOKENS, "t": "12"}, ['x.toml:5: data.path = "t"']),
    Wrong(
        "torn tokens.json",
        WHOLE | {"x.toml": TOKENS, "t/tokens.json": '{"version": 1}'},
        ['x.toml:5: data.path = "t"'],
    ),
    Wrong(
        "changed tokens.json",
        WHOLE
        | {
            "x.toml": TOKENS,
            "t/tokens.json": str(WHOLE["t/tokens.json"]).replace("t.json", "u.json"),
        },
        ['x.toml:5: data.path = "t"'],
    ),
    Wrong(
        "short tokens.bin",
        WHOLE | {"x.toml": TOKENS, "t/tokens.bin": b"12"},
        ['x.toml:5: data.path = "t"'],
    ),
    Wrong(
        "small vocabulary for tokens",
        token_files("t", vocab=257) | {"x.toml": TOKENS},
        ['x.toml:5: data.path = "t"'],
    ),
    Wrong(
        "another tokenizer",
        WHOLE
        | token_files("v", tokenizer=b"[]")
        | {"x.toml": TOKENS + '[validation]\npath = "v"\n'},
        ['x.toml:8: validation.path = "v"'],
    ),
    Wrong(
        "another tokenizer than the model",
        token_files("t", tokenizer=b'{"model": {"vocab": {"a": 0, "b": 1}}}')
        | {
            "x.toml": '[model]\nhf = "m"\n' + TOKENS.removeprefix(TINY),
            "m/config.json": HF,
            "m/tokenizer.json": '{"model": {"vocab": {"a": 0, "c": 1}}}',
        },
        ['x.toml:5: data.path = "t"'],
    ),
    Wrong(
        "a tokenizer of the model that is none",
        WHOLE
        | {
            "x.toml": '[model]\nhf = "m"\n' + TOKENS.removeprefix(TINY),
            "m/config.json": HF,
            "m/tokenizer.json": "[",
        },
        ['x.toml:5: data.path = "t"'],
    ),
    Wrong(
        "sources and path",
        {"x.toml": TEXT + SOURCES, "t": "some words", "u": "some words"},
        ['x.toml:5: data.path = "t"'],
    ),
    Wrong(
        "sources of python",
        TINY + SOURCES,
        ['x.toml:3: data.sources = [{ path = "t", weight = 1.0 }, { path = "u", weight = 0.5 }]'],
    ),
    Wrong(
        "a weight of nothing",
        TINY + '[data]\nsource = "text"\n' + SOURCES.replace("0.5", "0"),
        ['x.toml:5: data.sources = [{ path = "t", weight = 1.0 }, { path = "u", weight = 0.0 }]'],
    ),
    Wrong(
        "a source without a weight",
        TINY + '[data]\nsource = "text"\n[[data.sources]]\npath = "t"\n',
        ["x.toml:5: 'data.sources'"],
    ),
    Wrong(
        "sources of numbers",
        TINY + '[data]\nsource = "text"\nsources = [1, 2]\n',
        ["x.toml:5: 'data.sources'"],
    ),
    Wrong(
        "a missing source",
        {"x.toml": TINY + '[data]\nsource = "text"\nseq_len = 8\n' + SOURCES, "t": "some words"},
        ['x.toml:6: data.sources: path = "u" does not exist'],
    ),
    Wrong(
        "a short source",
        {
            "x.toml": TINY + '[data]\nsource = "text"\nseq_len = 8\n' + SOURCES,
            "t": "some words",
            "u": "few",
        },
        ["x.toml:5: data.seq_len = 8"],
    ),
    Wrong(
        "sources of two tokenizers",
        WHOLE
        | token_files("u", tokenizer=b"[]")
        | {"x.toml": TINY + '[data]\nsource = "tokens"\nseq_len = 8\n' + SOURCES},
        ['x.toml:6: data.sources: path = "u" was made with another tokenizer'],
    ),
    Wrong("token files as text", WHOLE | {"x.toml": TEXT}, ['x.toml:5: data.path = "t"']),
    Wrong(
        "token files as held-out JSONL",
        {
            "x.toml": TEXT.replace('"text"', '"jsonl"') + '[validation]\npath = "v"\n',
            "t": '{"text": "some words"}',
            "v/tokens.json": "",
        },
        ['x.toml:8: validation.path = "v"'],
    ),
    Wrong(
        "validation path for python",
        TINY + '[validation]\npath = "t"\n',
        ['x.toml:4: validation.path = "t"'],
    ),
    Wrong("no such text", TEXT, ['x.toml:5: data.path = "t"']),
    Wrong(
        "no held-out text",
        {"x.toml": TEXT + '[validation]\npath = "v"\n', "t": "some words"},
        ['x.toml:8: validation.path = "v"'],
    ),
    Wrong(
        "resume",
        TINY + '[checkpoint]\nresume = "runs/none"\n',
        ['x.toml:4: checkpoint.resume = "runs/none"'],
    ),
    Wrong(
        "no folder of first weights",
        TINY + '[checkpoint]\ninit = "runs/none"\n',
        ['x.toml:4: checkpoint.init = "runs/none"'],
    ),
    Wrong(
        "first weights of Hugging Face",
        {"x.toml": TINY + '[checkpoint]\ninit = "m"\n', "m/config.json": "{}"},
        ['x.toml:4: checkpoint.init = "m"'],
    ),
    Wrong(
        "first weights and a checkpoint",
        {"x.toml": TINY + '[checkpoint]\ninit = "m"\nresume = "m"\n', "m/x": ""},
        ['x.toml:4: checkpoint.init = "m"'],
    ),
]
