"""Recipes whose run, optimizer or data breaks a rule."""

from composer3d.facts.token_manifest import digest_of, digest_of_files
from tests.recipe.wrong import HF, TINY, Wrong, token_files

RUN = [
    Wrong("steps", TINY + "[run]\nsteps = 0\n"),
    Wrong("seed", TINY + "[run]\nseed = -1\n"),
    Wrong("name", TINY, sets=("run.name=a/b",)),
    Wrong("no name", TINY + '[run]\nname = ""\n'),
    Wrong("lr", TINY + "[optim]\nlr = 0\n"),
    Wrong("min_lr", TINY + "[optim]\nmin_lr = 1e-3\n"),
    Wrong("betas", TINY + "[optim]\nbetas = [0.9, 1]\n"),
    Wrong(
        "optimizer signs",
        TINY + "[optim]\neps = 0\nweight_decay = -0.1\nclip = -1\nwarmup = -1\nmin_lr = -1\n",
    ),
    Wrong("warmup", TINY + "[optim]\nwarmup = 11\n[run]\nsteps = 10\n"),
    Wrong("decay", TINY + "[optim]\nwarmup = 10\ndecay = 10\n"),
    Wrong(
        "constant with decay", TINY + '[optim]\nschedule = "constant"\ndecay = 10\nmin_lr = 1e-5\n'
    ),
    Wrong("decay_steps without wsd", TINY + "[optim]\ndecay_steps = 10\n"),
    Wrong("no decay_steps", TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 0\n'),
    Wrong(
        "wsd beyond decay",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 16\nwarmup = 5\ndecay = 20\n',
    ),
    Wrong(
        "wsd beyond the run",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 1\nwarmup = 20\n[run]\nsteps = 20\n',
    ),
    Wrong(
        "wsd before its warmup ends",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 5\nwarmup = 20\ndecay = 10\n',
    ),
    Wrong(
        "wsd whose end is its warmup's",
        TINY + '[optim]\nschedule = "wsd"\ndecay_steps = 5\nwarmup = 20\ndecay = 20\n',
    ),
    Wrong(
        "keys of Muon without it",
        TINY
        + "[optim]\nmatrix_lr = 1e-3\nmomentum = 0.9\nnesterov = false\nnewton_schulz_steps = 4\n"
        + 'matrices = ["last.*"]\nlr_scale = "original"\nnewton_schulz = [1, 2, 3]\n'
        + 'newton_schulz_dtype = "float32"\n',
    ),
    Wrong(
        "numbers of Muon",
        TINY
        + '[optim]\nname = "muon"\nmomentum = 1\nnewton_schulz = [1, 2, 300]\n'
        + "newton_schulz_steps = 100\nmatrix_lr = 0\n",
    ),
    Wrong(
        "groups of nothing that trains",
        TINY
        + '[optim]\ntrain = ["blocks.*"]\n[[optim.groups]]\ntrain = ["last.*"]\nlr_factor = 2\n',
    ),
    Wrong(
        "a group behind another",
        TINY + '[[optim.groups]]\ntrain = ["*"]\n[[optim.groups]]\ntrain = ["blocks.0.*"]\n',
    ),
    *(
        Wrong(f"a group with {line}", TINY + f'[[optim.groups]]\ntrain = ["*"]\n{line}\n')
        for line in ("lr_factor = 0", "lr_factor = 1001", "weight_decay = -1", "weight_decay = 11")
    ),
    *(
        Wrong(f"a group of {table}", TINY + f"[optim]\ngroups = [{table}]\n")
        for table in (
            "{ lr_factor = 2 }",
            '{ train = "*" }',
            '{ train = ["*"], lr = 2 }',
            '{ train = ["*"], lr_factor = "2" }',
        )
    ),
    Wrong(
        "globs of Muon", TINY + '[optim]\nname = "muon"\nmatrices = ["blocks.*.attn.*", "*norm*"]\n'
    ),
    *(
        Wrong(f"traced steps {steps}", TINY + f"[metrics]\ntimeline_steps = {steps}\n")
        for steps in ("[0, 3]", "[4, 3]", "[1, 101]", "[99999999, 100000000]")
    ),
    Wrong("too many profiled steps", TINY + "[metrics]\nprofile_steps = [1, 21]\n"),
    Wrong(
        "a profiled rank twice",
        TINY + "[metrics]\nprofile_steps = [1, 2]\nprofile_ranks = [0, 0]\n",
    ),
    Wrong(
        "a profiled rank that is none",
        TINY + "[metrics]\nprofile_steps = [1, 2]\nprofile_ranks = [0, 8]\n",
    ),
    Wrong("ranks without a profile", TINY + "[metrics]\nprofile_ranks = [1]\n"),
    Wrong(
        "a step that is traced and profiled",
        TINY + "[metrics]\nprofile_steps = [3, 4]\ntimeline_steps = [4, 5]\n",
    ),
    Wrong(
        "digests of one data-parallel rank",
        TINY + "[reliability]\ndigest_every = 10\n[mesh]\ndp_shard = 1\n",
    ),
    *(
        Wrong(
            f"straggler factor {factor}",
            TINY + f"[reliability]\nstraggler_factor = {factor}\nstraggler_window = 2\n",
        )
        for factor in ("1.05", "-1.0", "101.0")
    ),
    *(
        Wrong(f"{key} with {then}", TINY + f"[reliability]\non_bad_step = {then}\n{key} = 7\n")
        for key, then in (("max_bad_steps", '"rollback"'), ("max_rollbacks", '"skip"'))
    ),
    Wrong(
        "rollback without checkpoints",
        TINY
        + '[reliability]\non_bad_step = "rollback"\n[checkpoint]\nevery = 0\nevery_minutes = 0.0\n',
    ),
    Wrong("a window without spikes", TINY + "[reliability]\nspike_window = 64\n"),
    *(
        Wrong(
            f"spike sigma {sigma}",
            TINY + f"[reliability]\nspike_sigma = {sigma}\nspike_window = 7\n",
        )
        for sigma in ("1.9", "-6.0", "1001.0")
    ),
    Wrong(
        "counts",
        TINY
        + "[checkpoint]\nkeep = 0\nevery = -1\n[metrics]\nevery = 0\n"
        + "[validation]\nsteps = 0\nevery = -2\n",
    ),
]

TEXT = TINY + '[data]\nsource = "text"\npath = "t"\nseq_len = 8\n'  # the path is on line 5
TOKENS = TEXT.replace('"text"', '"tokens"')
WHOLE = token_files("t")
# What a later prepare adds to tokens.json.
CONTENT = {
    "digest": digest_of(b"the documents"),
    "files": digest_of_files([[digest_of(WHOLE["t/tokens.bin"])]]),
}
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
        "a sequence beyond every text", TINY + '[data]\nsource = "python"\nseq_len = 200000000\n'
    ),
    Wrong("text without path", TINY + '[data]\nsource = "text"\n'),
    Wrong("JSONL without path", TINY + '[data]\nsource = "jsonl"\n'),
    Wrong("tokens without path", TINY + '[data]\nsource = "tokens"\n'),
    Wrong("field of text", {"x.toml": TEXT + 'field = "body"\n', "t": "some words"}),
    Wrong("python with path", TINY + '[data]\npath = "t"\n'),
    Wrong(
        "validation without path", {"x.toml": TEXT + "[validation]\nevery = 5\n", "t": "some words"}
    ),
    Wrong(
        "validation of tokens without path",
        WHOLE | {"x.toml": TOKENS + "[validation]\nevery = 5\n"},
    ),
    Wrong("no token files", {"x.toml": TOKENS, "t/tokens.bin": "12"}),
    Wrong("a file for token files", {"x.toml": TOKENS, "t": "12"}),
    Wrong("torn tokens.json", WHOLE | {"x.toml": TOKENS, "t/tokens.json": '{"version": 1}'}),
    Wrong(
        "changed tokens.json",
        WHOLE
        | {
            "x.toml": TOKENS,
            "t/tokens.json": str(WHOLE["t/tokens.json"]).replace("t.json", "u.json"),
        },
    ),
    Wrong("short tokens.bin", WHOLE | {"x.toml": TOKENS, "t/tokens.bin": b"12"}),
    Wrong("small vocabulary for tokens", token_files("t", vocab=257) | {"x.toml": TOKENS}),
    Wrong(
        "another tokenizer",
        WHOLE
        | token_files("v", tokenizer=b"[]")
        | {"x.toml": TOKENS + '[validation]\npath = "v"\n'},
    ),
    Wrong(
        "bytes for a model of another tokenizer",
        {
            "x.toml": '[model]\nhf = "m"\n' + TEXT.removeprefix(TINY),
            "t": "some words",
            "m/config.json": HF,
            "m/tokenizer.json": '{"model": {"vocab": {"a": 0}}}',
        },
    ),
    Wrong(
        "bytes for a model whose vocabulary is not read",
        {
            "x.toml": '[model]\nhf = "m"\n' + TEXT.removeprefix(TINY),
            "t": "some words",
            "m/config.json": HF,
            "m/tekken.json": "{}",
        },
    ),
    Wrong(
        "another tokenizer than the model",
        token_files("t", tokenizer=b'{"model": {"vocab": {"a": 0, "b": 1}}}')
        | {
            "x.toml": '[model]\nhf = "m"\n' + TOKENS.removeprefix(TINY),
            "m/config.json": HF,
            "m/tokenizer.json": '{"model": {"vocab": {"a": 0, "c": 1}}}',
        },
    ),
    Wrong(
        "a tokenizer of the model that is none",
        WHOLE
        | {
            "x.toml": '[model]\nhf = "m"\n' + TOKENS.removeprefix(TINY),
            "m/config.json": HF,
            "m/tokenizer.json": "[",
        },
    ),
    Wrong("sources and path", {"x.toml": TEXT + SOURCES, "t": "some words", "u": "some words"}),
    Wrong("text in a store", TINY + '[data]\nsource = "text"\npath = "s3://bucket/text"\n'),
    Wrong(
        "a source in a store",
        TINY + '[data]\nsource = "jsonl"\n' + SOURCES.replace('"u"', '"gs://bucket/u"'),
    ),
    Wrong(
        "held-out text in a store",
        TINY
        + '[data]\nsource = "text"\npath = "t"\n'
        + '[validation]\nevery = 2\npath = "az://container/t"\n',
    ),
    Wrong("a password in a URL", TINY + '[data]\nsource = "tokens"\npath = "s3://me:word@b/t"\n'),
    Wrong("another kind of store", TINY + '[data]\nsource = "tokens"\npath = "hdfs://host/t"\n'),
    Wrong("copies of text", TINY + '[data]\nsource = "text"\npath = "t"\ncache_dir = "c"\n'),
    Wrong("copies in a store", TINY + '[data]\nsource = "tokens"\ncache_dir = "s3://bucket/c"\n'),
    Wrong("a bound of no copies", TINY + "[data]\ncache_gib = 8\n"),
    Wrong("copies of no bytes", TINY + '[data]\ncache_dir = "c"\ncache_gib = 0\n'),
    Wrong("a run beside no checkpoints", TINY + "[run]\nsync = true\n"),
    Wrong("sources of python", TINY + SOURCES),
    Wrong("a weight of nothing", TINY + '[data]\nsource = "text"\n' + SOURCES.replace("0.5", "0")),
    Wrong(
        "a source without a weight",
        TINY + '[data]\nsource = "text"\n[[data.sources]]\npath = "t"\n',
    ),
    Wrong("sources of numbers", TINY + '[data]\nsource = "text"\nsources = [1, 2]\n'),
    Wrong(
        "a missing source",
        {"x.toml": TINY + '[data]\nsource = "text"\nseq_len = 8\n' + SOURCES, "t": "some words"},
    ),
    Wrong(
        "a short source",
        {
            "x.toml": TINY + '[data]\nsource = "text"\nseq_len = 8\n' + SOURCES,
            "t": "some words",
            "u": "few",
        },
    ),
    Wrong(
        "sources of two tokenizers",
        WHOLE
        | token_files("u", tokenizer=b"[]")
        | {"x.toml": TINY + '[data]\nsource = "tokens"\nseq_len = 8\n' + SOURCES},
    ),
    Wrong(
        "a source twice",
        {
            "x.toml": TINY
            + '[data]\nsource = "text"\nseq_len = 8\n'
            + SOURCES.replace('"u"', '"./t"'),
            "t": "some words",
        },
    ),
    Wrong(
        "a copy of token files as a source",
        token_files("t", content=CONTENT)
        | token_files("u", content=CONTENT)
        | {"x.toml": TINY + '[data]\nsource = "tokens"\nseq_len = 8\n' + SOURCES},
    ),
    Wrong("JSONL in a folder of text", {"x.toml": TEXT, "t/a.txt": "x", "t/b/c.JSONL": "{}"}),
    Wrong("JSONL as text", {"x.toml": TEXT.replace('"t"', '"t.JSONL.gz"'), "t.JSONL.gz": "x"}),
    Wrong("token files as text", WHOLE | {"x.toml": TEXT}),
    Wrong(
        "token files as held-out JSONL",
        {
            "x.toml": TEXT.replace('"text"', '"jsonl"') + '[validation]\npath = "v"\n',
            "t": '{"text": "some words"}',
            "v/tokens.json": "",
        },
    ),
    Wrong("validation path for python", TINY + '[validation]\npath = "t"\n'),
    Wrong("no such text", TEXT),
    Wrong("no held-out text", {"x.toml": TEXT + '[validation]\npath = "v"\n', "t": "some words"}),
    Wrong("resume", TINY + '[checkpoint]\nresume = "runs/none"\n'),
    Wrong("checkpoints on a disk elsewhere", TINY + '[checkpoint]\nfolder = "/checkpoints"\n'),
    Wrong("a URL that stands for several", TINY + '[checkpoint]\nfolder = "s3://b/exp[12]"\n'),
    Wrong("a store that is not known", TINY + '[checkpoint]\nresume = "ftp://b/a"\n'),
    Wrong(
        "a name that no URL has",
        TINY + '[run]\nname = "a b"\n[checkpoint]\nfolder = "file:///checkpoints"\n',
    ),
    Wrong("no folder of first weights", TINY + '[checkpoint]\ninit = "runs/none"\n'),
    Wrong(
        "first weights of Hugging Face",
        {"x.toml": TINY + '[checkpoint]\ninit = "m"\n', "m/config.json": "{}"},
    ),
    Wrong(
        "first weights and a checkpoint",
        {"x.toml": TINY + '[checkpoint]\ninit = "m"\nresume = "m"\n', "m/x": ""},
    ),
]
