"""Recipes whose run, optimizer or data breaks a rule."""

from composer3d.facts.text import NAME_RULE
from tests.recipe.wrong import HF, TINY, Wrong, token_files

RUN = [
    Wrong(
        "steps",
        TINY + "[run]\nsteps = 0\n",
        ["x.toml:4: run.steps = 0 must be from 1 to 1_000_000_000"],
    ),
    Wrong("seed", TINY + "[run]\nseed = -1\n", ["x.toml:4: run.seed = -1 must be at least 0"]),
    Wrong(
        "name",
        TINY,
        [f'--set run.name=a/b: run.name = "a/b" cannot name the folder of the run: it {NAME_RULE}'],
        ("run.name=a/b",),
    ),
    Wrong(
        "no name",
        TINY + '[run]\nname = ""\n',
        [f'x.toml:4: run.name = "" cannot name the folder of the run: it {NAME_RULE}'],
    ),
    Wrong(
        "lr",
        TINY + "[optim]\nlr = 0\n",
        [
            "x.toml:4: optim.lr = 0.0 must be above 0 and at most 10",
        ],
    ),
    Wrong(
        "min_lr",
        TINY + "[optim]\nmin_lr = 1e-3\n",
        [
            "x.toml:4: optim.min_lr = 0.001 must be at most optim.lr = 0.0003 (default); use "
            "optim.min_lr = 0.0003, or a larger optim.lr"
        ],
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
            "x.toml:4: optim.eps = 0.0 must be above 0 and at most 1",
            "x.toml:5: optim.weight_decay = -0.1 must be from 0 to 10",
            "x.toml:6: optim.clip = -1.0 must be from 0 to 1_000_000_000",
            "x.toml:7: optim.warmup = -1 must be from 0 to 1_000_000_000",
            "x.toml:8: optim.min_lr = -1.0 must be from 0 to 10",
        ],
    ),
    Wrong(
        "warmup",
        TINY + "[optim]\nwarmup = 11\n[run]\nsteps = 10\n",
        [
            "x.toml:4: optim.warmup = 11 must be at most run.steps = 10 (x.toml:6); use "
            "optim.warmup = 10, or a larger run.steps"
        ],
    ),
    Wrong(
        "decay",
        TINY + "[optim]\nwarmup = 10\ndecay = 10\n",
        [
            "x.toml:5: optim.decay = 10 must be above optim.warmup = 10 (x.toml:4): the decay "
            "starts after the warmup"
        ],
    ),
    Wrong(
        "constant with decay",
        TINY + '[optim]\nschedule = "constant"\ndecay = 10\nmin_lr = 1e-5\n',
        [
            'x.toml:5: optim.decay = 10 is not used with optim.schedule = "constant" (x.toml:4); '
            "remove it, or use a schedule that decays",
            'x.toml:6: optim.min_lr = 1e-05 is not used with optim.schedule = "constant" '
            "(x.toml:4); use 0, or a schedule that decays",
        ],
    ),
    Wrong(
        "decay_steps without wsd",
        TINY + "[optim]\ndecay_steps = 10\n",
        [
            'x.toml:4: optim.decay_steps = 10 is not used with optim.schedule = "cosine" '
            '(default); remove it, or use optim.schedule = "wsd"'
        ],
    ),
    Wrong(
        "no decay_steps",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 0\n',
        ["x.toml:5: optim.decay_steps = 0 must be from 1 to 1_000_000_000"],
    ),
    Wrong(
        "wsd beyond decay",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 16\nwarmup = 5\ndecay = 20\n',
        [
            "x.toml:5: optim.decay_steps = 16 after optim.warmup = 5 (x.toml:6) would end after "
            "optim.decay = 20 (x.toml:7); use at most 15"
        ],
    ),
    Wrong(
        "wsd beyond the run",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 1\nwarmup = 20\n[run]\nsteps = 20\n',
        [
            "x.toml:5: optim.decay_steps = 1 after optim.warmup = 20 (x.toml:6) would end after "
            "run.steps = 20 (x.toml:8); use a smaller optim.warmup"
        ],
    ),
    Wrong(
        "wsd before its warmup ends",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 5\nwarmup = 20\ndecay = 10\n',
        [
            "x.toml:7: optim.decay = 10 must be above optim.warmup = 20 (x.toml:6): the decay "
            "starts after the warmup"
        ],
    ),
    Wrong(
        "wsd whose end is its warmup's",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 5\nwarmup = 20\ndecay = 20\n',
        [
            "x.toml:7: optim.decay = 20 must be above optim.warmup = 20 (x.toml:6): the decay "
            "starts after the warmup"
        ],
    ),
    *(
        Wrong(
            f"traced steps {steps}",
            TINY + f"[metrics]\ntimeline_steps = {steps}\n",
            [
                f"x.toml:4: metrics.timeline_steps = {steps} must be the first and the last step, "
                "counted from 1, and at most 100 steps in all"
            ],
        )
        for steps in ("[0, 3]", "[4, 3]", "[1, 101]", "[1000000000, 1000000001]")
    ),
    Wrong(
        "too many profiled steps",
        TINY + "[metrics]\nprofile_steps = [1, 21]\n",
        [
            "x.toml:4: metrics.profile_steps = [1, 21] must be the first and the last step, "
            "counted from 1, and at most 20 steps in all"
        ],
    ),
    Wrong(
        "a profiled rank twice",
        TINY + "[metrics]\nprofile_steps = [1, 2]\nprofile_ranks = [0, 0]\n",
        [
            "x.toml:5: metrics.profile_ranks = [0, 0] must be ranks, counted from 0, each of them "
            "once"
        ],
    ),
    Wrong(
        "a profiled rank that is none",
        TINY + "[metrics]\nprofile_steps = [1, 2]\nprofile_ranks = [0, 8]\n",
        [
            "x.toml:5: metrics.profile_ranks = [0, 8] must be below the number of ranks of [mesh], "
            "1; use 0 to 0"
        ],
    ),
    Wrong(
        "ranks without a profile",
        TINY + "[metrics]\nprofile_ranks = [1]\n",
        [
            "x.toml:4: metrics.profile_ranks = [1] is not used without metrics.profile_steps; "
            "remove it"
        ],
    ),
    Wrong(
        "a step that is traced and profiled",
        TINY + "[metrics]\nprofile_steps = [3, 4]\ntimeline_steps = [4, 5]\n",
        [
            "x.toml:4: metrics.profile_steps = [3, 4] and metrics.timeline_steps = [4, 5] "
            "(x.toml:5) have a step in common; use different steps"
        ],
    ),
    Wrong(
        "digests of one data-parallel rank",
        TINY + "[reliability]\ndigest_every = 10\n[mesh]\ndp_shard = 1\n",
        [
            "x.toml:4: reliability.digest_every = 10 compares data-parallel ranks, and there is "
            "one: mesh.dp_replicate = 1 (default), mesh.dp_shard = 1 (x.toml:6); raise one of "
            "these, or use reliability.digest_every = 0"
        ],
    ),
    *(
        Wrong(
            f"straggler factor {factor}",
            TINY + f"[reliability]\nstraggler_factor = {factor}\nstraggler_window = 2\n",
            [
                f"x.toml:4: reliability.straggler_factor = {factor} must be from 1.1 to 100, or 0 "
                "to watch nothing",
                "x.toml:5: reliability.straggler_window = 2 must be from 3 to 1_000",
            ],
        )
        for factor in ("1.05", "-1.0", "101.0")
    ),
    *(
        Wrong(
            f"{key} with {then}",
            TINY + f"[reliability]\non_bad_step = {then}\n{key} = 7\n",
            [
                f"x.toml:5: reliability.{key} = 7 is not used with reliability.on_bad_step = "
                f"{then} (x.toml:4); remove it, or use reliability.on_bad_step = {needed}"
            ],
        )
        for key, then, needed in (
            ("max_bad_steps", '"rollback"', '"skip"'),
            ("max_rollbacks", '"skip"', '"rollback"'),
        )
    ),
    Wrong(
        "rollback without checkpoints",
        TINY
        + '[reliability]\non_bad_step = "rollback"\n[checkpoint]\nevery = 0\nevery_minutes = 0.0\n',
        [
            'x.toml:4: reliability.on_bad_step = "rollback" goes back to a checkpoint, but '
            "checkpoint.every = 0 (x.toml:6) and checkpoint.every_minutes = 0.0 (x.toml:7) save "
            "none before the end; raise checkpoint.every"
        ],
    ),
    Wrong(
        "a window without spikes",
        TINY + "[reliability]\nspike_window = 64\n",
        [
            "x.toml:4: reliability.spike_window = 64 is not used with reliability.spike_sigma = "
            "0.0 (default); remove it, or use reliability.spike_sigma = 6"
        ],
    ),
    *(
        Wrong(
            f"spike sigma {sigma}",
            TINY + f"[reliability]\nspike_sigma = {sigma}\nspike_window = 7\n",
            [
                f"x.toml:4: reliability.spike_sigma = {sigma} must be from 2 to 1000, or 0 to let "
                "no finite value count as a spike",
                "x.toml:5: reliability.spike_window = 7 must be from 8 to 1_000",
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
            "x.toml:5: checkpoint.every = -1 must be from 0 to 1_000_000_000",
            "x.toml:4: checkpoint.keep = 0 must be from 1 to 1_000_000",
            "x.toml:7: metrics.every = 0 must be from 1 to 1_000_000_000",
            "x.toml:10: validation.every = -2 must be from 0 to 1_000_000_000",
            "x.toml:9: validation.steps = 0 must be from 1 to 1_000_000",
        ],
    ),
]

TEXT = TINY + '[data]\nsource = "text"\npath = "t"\nseq_len = 8\n'  # the path is on line 5
TOKENS = TEXT.replace('"text"', '"tokens"')
UNUSABLE = 'x.toml:5: data.path = "t" cannot be used: t'
AGAIN = "make the folder again with composer3d prepare"
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
        ["x.toml:5: data.seq_len = 200000000 must be from 1 to 134_217_728"],
    ),
    Wrong(
        "text without path",
        TINY + '[data]\nsource = "text"\n',
        ['x.toml:4: data.source = "text" needs data.path: a text file or a folder of them'],
    ),
    Wrong(
        "JSONL without path",
        TINY + '[data]\nsource = "jsonl"\n',
        ['x.toml:4: data.source = "jsonl" needs data.path: a .jsonl file or a folder of them'],
    ),
    Wrong(
        "tokens without path",
        TINY + '[data]\nsource = "tokens"\n',
        ['x.toml:4: data.source = "tokens" needs data.path: a folder that composer3d prepare made'],
    ),
    Wrong(
        "field of text",
        {"x.toml": TEXT + 'field = "body"\n', "t": "some words"},
        [
            'x.toml:7: data.field = "body" is not used with data.source = "text" (x.toml:4); '
            'remove it, or use data.source = "jsonl"'
        ],
    ),
    Wrong(
        "python with path",
        TINY + '[data]\npath = "t"\n',
        [
            'x.toml:4: data.path = "t" is not used with data.source = "python" (default); remove '
            'it, or use data.source = "text", "jsonl" or "tokens"'
        ],
    ),
    Wrong(
        "validation without path",
        {"x.toml": TEXT + "[validation]\nevery = 5\n", "t": "some words"},
        [
            'x.toml:8: validation.every = 5 with data.source = "text" (x.toml:4) needs '
            "validation.path, the held-out data: a text file or a folder of them; set it, or use "
            "validation.every = 0"
        ],
    ),
    Wrong(
        "validation of tokens without path",
        WHOLE | {"x.toml": TOKENS + "[validation]\nevery = 5\n"},
        [
            'x.toml:8: validation.every = 5 with data.source = "tokens" (x.toml:4) needs '
            "validation.path, the held-out data: a folder that composer3d prepare made; set it, "
            "or use validation.every = 0"
        ],
    ),
    Wrong(
        "no token files",
        {"x.toml": TOKENS, "t/tokens.bin": "12"},
        [f"{UNUSABLE} has no tokens.json; give a folder that composer3d prepare made"],
    ),
    Wrong(
        "a file for token files",
        {"x.toml": TOKENS, "t": "12"},
        [f"{UNUSABLE} has no tokens.json; give a folder that composer3d prepare made"],
    ),
    Wrong(
        "torn tokens.json",
        WHOLE | {"x.toml": TOKENS, "t/tokens.json": '{"version": 1}'},
        [f"{UNUSABLE}/tokens.json cannot be used (it lacks format); {AGAIN}"],
    ),
    Wrong(
        "changed tokens.json",
        WHOLE
        | {
            "x.toml": TOKENS,
            "t/tokens.json": str(WHOLE["t/tokens.json"]).replace("t.json", "u.json"),
        },
        [f"{UNUSABLE}/tokens.json cannot be used (its digest does not match its content); {AGAIN}"],
    ),
    Wrong(
        "short tokens.bin",
        WHOLE | {"x.toml": TOKENS, "t/tokens.bin": b"12"},
        [f"{UNUSABLE}/tokens.bin has 2 bytes, but tokens.json says 200 bytes; {AGAIN}"],
    ),
    Wrong(
        "small vocabulary for tokens",
        token_files("t", vocab=257) | {"x.toml": TOKENS},
        [
            'x.toml:5: data.path = "t" has a vocabulary of 257 tokens, more than model.vocab = '
            "256 (preset debug-tiny); set model.vocab to 257 or more"
        ],
    ),
    Wrong(
        "another tokenizer",
        WHOLE
        | token_files("v", tokenizer=b"[]")
        | {"x.toml": TOKENS + '[validation]\npath = "v"\n'},
        [
            'x.toml:8: validation.path = "v" was made with another tokenizer or end of document '
            "than data.path; prepare it again with the --tokenizer and --eod of data.path"
        ],
    ),
    Wrong(
        "another tokenizer than the model",
        token_files("t", tokenizer=b'{"model": {"vocab": {"a": 0, "b": 1}}}')
        | {
            "x.toml": '[model]\nhf = "m"\n' + TOKENS.removeprefix(TINY),
            "m/config.json": HF,
            "m/tokenizer.json": '{"model": {"vocab": {"a": 0, "c": 1}}}',
        },
        [
            'x.toml:5: data.path = "t" has another tokenizer than model.hf = "m": token 1 is "b" '
            'in the data and "c" in the model; prepare the data with the tokenizer of the model, '
            "or set data.other_tokenizer = true to train nevertheless"
        ],
    ),
    Wrong(
        "a tokenizer of the model that is none",
        WHOLE
        | {
            "x.toml": '[model]\nhf = "m"\n' + TOKENS.removeprefix(TINY),
            "m/config.json": HF,
            "m/tokenizer.json": "[",
        },
        [
            'x.toml:5: data.path = "t" has another tokenizer than model.hf = "m": they cannot be '
            "compared: Expecting value: line 1 column 2 (char 1); prepare the data with the "
            "tokenizer of the model, or set data.other_tokenizer = true to train nevertheless"
        ],
    ),
    Wrong(
        "sources and path",
        {"x.toml": TEXT + SOURCES, "t": "some words", "u": "some words"},
        [
            'x.toml:5: data.path = "t" and data.sources both name the training data; remove one',
        ],
    ),
    Wrong(
        "sources of python",
        TINY + SOURCES,
        [
            'x.toml:3: data.sources = [{ path = "t", weight = 1.0 }, { path = "u", weight = 0.5 }] '
            'is not used with data.source = "python" (default); remove it, or use data.source = '
            '"text", "jsonl" or "tokens"'
        ],
    ),
    Wrong(
        "a weight of nothing",
        TINY + '[data]\nsource = "text"\n' + SOURCES.replace("0.5", "0"),
        [
            'x.toml:5: data.sources = [{ path = "t", weight = 1.0 }, { path = "u", weight = 0.0 }] '
            "must be 1 to 128 tables, each with a path of 1 to 4096 characters, without control "
            "characters, and a weight from 0.000001 to 1_000_000"
        ],
    ),
    Wrong(
        "a source without a weight",
        TINY + '[data]\nsource = "text"\n[[data.sources]]\npath = "t"\n',
        [
            "x.toml:5: 'data.sources' must be an array of tables with path and weight, got "
            '[{ path = "t" }]'
        ],
    ),
    Wrong(
        "sources of numbers",
        TINY + '[data]\nsource = "text"\nsources = [1, 2]\n',
        ["x.toml:5: 'data.sources' must be an array of tables with path and weight, got [1, 2]"],
    ),
    Wrong(
        "a missing source",
        {"x.toml": TINY + '[data]\nsource = "text"\nseq_len = 8\n' + SOURCES, "t": "some words"},
        [
            'x.toml:6: data.sources: path = "u" does not exist; give a text file or a folder of '
            "them, relative to the working directory"
        ],
    ),
    Wrong(
        "a short source",
        {
            "x.toml": TINY + '[data]\nsource = "text"\nseq_len = 8\n' + SOURCES,
            "t": "some words",
            "u": "few",
        },
        [
            'x.toml:5: data.seq_len = 8 needs 9 tokens, but data.sources: path = "u" has 4; use a '
            "smaller data.seq_len or more text"
        ],
    ),
    Wrong(
        "sources of two tokenizers",
        WHOLE
        | token_files("u", tokenizer=b"[]")
        | {"x.toml": TINY + '[data]\nsource = "tokens"\nseq_len = 8\n' + SOURCES},
        [
            'x.toml:6: data.sources: path = "u" was made with another tokenizer or end of document '
            "than the first of data.sources; prepare it again with the --tokenizer and --eod of "
            "the first of data.sources"
        ],
    ),
    Wrong(
        "token files as text",
        WHOLE | {"x.toml": TEXT},
        [
            'x.toml:5: data.path = "t" contains tokens.json, which composer3d prepare made; use '
            'data.source = "tokens"'
        ],
    ),
    Wrong(
        "token files as held-out JSONL",
        {
            "x.toml": TEXT.replace('"text"', '"jsonl"') + '[validation]\npath = "v"\n',
            "t": '{"text": "some words"}',
            "v/tokens.json": "",
        },
        [
            'x.toml:8: validation.path = "v" contains tokens.json, which composer3d prepare '
            'made; use data.source = "tokens"'
        ],
    ),
    Wrong(
        "validation path for python",
        TINY + '[validation]\npath = "t"\n',
        [
            'x.toml:4: validation.path = "t" is not used with data.source = "python" (default); '
            'remove it, or use data.source = "text", "jsonl" or "tokens"'
        ],
    ),
    Wrong(
        "no such text",
        TEXT,
        [
            'x.toml:5: data.path = "t" does not exist; give a text file or a folder of them, '
            "relative to the working directory"
        ],
    ),
    Wrong(
        "no held-out text",
        {"x.toml": TEXT + '[validation]\npath = "v"\n', "t": "some words"},
        [
            'x.toml:8: validation.path = "v" does not exist; give a text file or a folder of '
            "them, relative to the working directory"
        ],
    ),
    Wrong(
        "resume",
        TINY + '[checkpoint]\nresume = "runs/none"\n',
        [
            'x.toml:4: checkpoint.resume = "runs/none" is not a folder; use "auto", "none" or '
            "the folder of a checkpoint, relative to the working directory"
        ],
    ),
    Wrong(
        "no folder of first weights",
        TINY + '[checkpoint]\ninit = "runs/none"\n',
        [
            'x.toml:4: checkpoint.init = "runs/none" is not a folder; give the folder of a '
            "checkpoint or of a run, relative to the working directory"
        ],
    ),
    Wrong(
        "first weights of Hugging Face",
        {"x.toml": TINY + '[checkpoint]\ninit = "m"\n', "m/config.json": "{}"},
        [
            'x.toml:4: checkpoint.init = "m" is a folder in Hugging Face format; start from it '
            'with model.hf = "m"'
        ],
    ),
    Wrong(
        "first weights and a checkpoint",
        {"x.toml": TINY + '[checkpoint]\ninit = "m"\nresume = "m"\n', "m/x": ""},
        [
            'x.toml:4: checkpoint.init = "m" is not used with checkpoint.resume = "m" (x.toml:5); '
            'remove it, or use checkpoint.resume = "auto" or "none"'
        ],
    ),
]
