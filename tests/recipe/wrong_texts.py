"""Recipes that cannot be read: wrong types, unknown names, wrong overrides, unreadable files."""

from tests.recipe.wrong import SCHEDULES, TABLES, TINY, Wrong

TOP = f"a recipe has base and the tables {TABLES}"

TYPES = [
    Wrong(
        "str for int",
        TINY + '[mesh]\ntp = "four"\n',
        ["x.toml:4: 'mesh.tp' must be int, got \"four\""],
    ),
    Wrong(
        "bool for int", TINY + "[mesh]\ntp = true\n", ["x.toml:4: 'mesh.tp' must be int, got true"]
    ),
    Wrong(
        "float for int", TINY + "[mesh]\ntp = 2.0\n", ["x.toml:4: 'mesh.tp' must be int, got 2.0"]
    ),
    Wrong(
        "int for bool",
        TINY + "[metrics]\ntensorboard = 1\n",
        ["x.toml:4: 'metrics.tensorboard' must be bool, got 1"],
    ),
    Wrong("int for str", TINY + "[run]\nname = 7\n", ["x.toml:4: 'run.name' must be str, got 7"]),
    Wrong(
        "bool for float",
        TINY + "[optim]\nlr = false\n",
        ["x.toml:4: 'optim.lr' must be float, got false"],
    ),
    Wrong(
        "nan",
        TINY + "[optim]\nlr = nan\n",
        ["x.toml:4: 'optim.lr' must be a finite float, got nan"],
    ),
    Wrong(
        "infinity",
        TINY + "[optim]\nclip = -inf\n",
        ["x.toml:4: 'optim.clip' must be a finite float, got -inf"],
    ),
    Wrong(
        "int beyond float",
        TINY + f"[optim]\nlr = 1{'0' * 400}\n",
        ["x.toml:4: 'optim.lr' must be an int of 64 bits, got one of 1,329 bits"],
    ),
    Wrong(
        "int beyond 64 bits",
        TINY + "[run]\nseed = 9223372036854775808\n",
        ["x.toml:4: 'run.seed' must be an int of 64 bits, got 9223372036854775808"],
    ),
    Wrong(
        "date",
        TINY + "[run]\nsteps = 2024-05-01 07:32:00\n",
        ["x.toml:4: 'run.steps' must be int, got 2024-05-01 07:32:00"],
    ),
    Wrong(
        "not a choice",
        TINY + '[parallel]\nschedule = "1f1b"\n',
        [f"x.toml:4: 'parallel.schedule' must be {SCHEDULES}, got \"1f1b\""],
    ),
    Wrong(
        "not a number of choice",
        TINY + "[parallel]\nzero = 4\n",
        ["x.toml:4: 'parallel.zero' must be 0, 1, 2 or 3, got 4"],
    ),
    Wrong(
        "true is not 1",
        TINY + "[parallel]\nzero = true\n",
        ["x.toml:4: 'parallel.zero' must be 0, 1, 2 or 3, got true"],
    ),
    Wrong(
        "short array",
        TINY + "[optim]\nbetas = [0.9]\n",
        ["x.toml:4: 'optim.betas' must be an array of 2 floats, got [0.9]"],
    ),
    Wrong(
        "array of wrong things",
        TINY + '[optim]\nbetas = [\n  0.9,\n  "a",\n]\n',
        ["x.toml:4: 'optim.betas' must be an array of 2 floats, got [0.9, \"a\"]"],
    ),
    Wrong(
        "optional str", TINY + "[data]\npath = 3\n", ["x.toml:4: 'data.path' must be str, got 3"]
    ),
    Wrong(
        "optional int",
        TINY + '[optim]\ndecay = "late"\n',
        ["x.toml:4: 'optim.decay' must be int, got \"late\""],
    ),
    Wrong(
        "table for int",
        TINY + "[mesh.tp]\nsize = 2\n",
        ["x.toml:3: 'mesh.tp' must be int, got { size = 2 }"],
    ),
    Wrong(
        "value for table",
        "mesh = 4\n" + TINY,
        ["x.toml:1: 'mesh' must be a table, [mesh] with its keys, got 4"],
    ),
    Wrong(
        "array of tables",
        TINY + "[[mesh]]\ntp = 2\n",
        ["x.toml:3: 'mesh' must be a table, [mesh] with its keys, got [{ tp = 2 }]"],
    ),
    Wrong(
        "inline table",
        TINY + "mesh = { pp = 1 }\n",
        [
            "x.toml:3: unknown key 'model.mesh'; the keys of [model] are dim, n_layers, n_heads, "
            "n_kv_heads, ffn, vocab, rope_theta, norm_eps, head_dim, tied, rope_factor, "
            "rope_low_freq, rope_high_freq, rope_context, qk_norm, qkv_bias, window, architecture, "
            "preset, hf"
        ],
    ),
    Wrong(
        "inline table at the top",
        'mesh = { pp = 1, tp = "2" }\n' + TINY,
        ["x.toml:1: 'mesh.tp' must be int, got \"2\""],
    ),
    Wrong(
        "array of any length",
        TINY + "[parallel]\nstages = [1, 2.5]\n",
        ["x.toml:4: 'parallel.stages' must be an array of ints, got [1, 2.5]"],
    ),
    Wrong("dotted key", 'mesh.tp = "2"\n' + TINY, ["x.toml:1: 'mesh.tp' must be int, got \"2\""]),
]

NAMES = [
    Wrong(
        "near a sibling",
        TINY + '[parallel]\nshedule = "1F1B"\n',
        ["x.toml:4: unknown key 'parallel.shedule'; did you mean 'schedule'?"],
    ),
    Wrong(
        "in the wrong table",
        TINY + "[run]\nlr = 1e-3\n",
        ["x.toml:4: unknown key 'run.lr'; did you mean 'optim.lr'?"],
    ),
    Wrong(
        "of two tables",
        TINY + "[mesh]\nmicro_batch = 2\nseed = 1\n",
        [
            "x.toml:4: unknown key 'mesh.micro_batch'; did you mean 'data.micro_batch'?",
            "x.toml:5: unknown key 'mesh.seed'; did you mean 'run.seed' or 'data.seed'?",
        ],
    ),
    Wrong(
        "near nothing",
        TINY + "[mesh]\nzzz = 2\n",
        [
            "x.toml:4: unknown key 'mesh.zzz'; the keys of [mesh] are pp, dp_replicate, "
            "dp_shard, cp, tp, ep"
        ],
    ),
    Wrong(
        "without its table",
        "tp = 2\n" + TINY,
        ["x.toml:1: unknown key 'tp'; did you mean 'mesh.tp'?"],
    ),
    Wrong(
        "unknown table",
        TINY + "[paralel]\nzero = 1\n",
        ["x.toml:3: unknown table 'paralel'; did you mean 'parallel'?"],
    ),
    Wrong(
        "table near nothing",
        TINY + "[zzz]\n",
        [f"x.toml:3: unknown table 'zzz'; {TOP}"],
    ),
    Wrong(
        "top key near nothing",
        "qqq = 1\n" + TINY,
        [f"x.toml:1: unknown key 'qqq'; {TOP}"],
    ),
]

SETS = [
    Wrong(
        "set: type",
        TINY,
        ["--set mesh.tp=four: 'mesh.tp' must be int, got \"four\""],
        ("mesh.tp=four",),
    ),
    Wrong("set: empty", TINY, ["--set mesh.tp=: 'mesh.tp' must be int, got \"\""], ("mesh.tp=",)),
    Wrong(
        "set: quoted number",
        TINY,
        ['--set mesh.tp="2": \'mesh.tp\' must be int, got "2"'],
        ('mesh.tp="2"',),
    ),
    Wrong(
        "set: choice",
        TINY,
        [f"--set parallel.schedule=gpipe: 'parallel.schedule' must be {SCHEDULES}, got \"gpipe\""],
        ("parallel.schedule=gpipe",),
    ),
    Wrong(
        "set: more than a value",
        TINY,
        ["--set mesh.tp=1\\npp=2: 'mesh.tp' must be int, got \"1\\npp=2\""],
        ("mesh.tp=1\npp=2",),
    ),
    Wrong("set: no value", TINY, ["--set mesh.tp: write it as table.key=value"], ("mesh.tp",)),
    Wrong(
        "set: unknown",
        TINY,
        ["--set mesh.tpp=2: unknown key 'mesh.tpp'; did you mean 'tp'?"],
        ("mesh.tpp=2",),
    ),
    Wrong("set: no table", TINY, ["--set steps=2: write it as table.key=value"], ("steps=2",)),
    Wrong(
        "set: near a table",
        TINY,
        [
            "--set paralel.schedule=x: unknown key 'paralel.schedule'; did you mean "
            "'parallel.schedule' or 'optim.schedule'?"
        ],
        ("paralel.schedule=x",),
    ),
    Wrong("set: nothing near", TINY, [f"--set z.z=x: unknown key 'z.z'; {TOP}"], ("z.z=x",)),
    Wrong("set: table", TINY, ["--set mesh=2: write it as table.key=value"], ("mesh=2",)),
    Wrong(
        "set: bytes", TINY, ["--set run.name=\\udcff: the text must be UTF-8"], ("run.name=\udcff",)
    ),
]

FILES = [
    Wrong("no value", TINY + "[mesh]\ntp =\n", ["x.toml:4: not TOML: Invalid value (column 5)"]),
    Wrong(
        "open string",
        TINY + '[run]\nname = "a\n',
        ["x.toml:4: not TOML: Illegal character '\\n' (column 10)"],
    ),
    Wrong(
        "key twice",
        TINY + "[mesh]\ntp = 1\ntp = 2\n",
        ["x.toml:5: not TOML: Cannot overwrite a value (column 7)"],
    ),
    Wrong(
        "table twice",
        TINY + "[mesh]\ntp = 1\n[mesh]\npp = 2\n",
        ["x.toml:5: not TOML: Cannot declare ('mesh',) twice (column 6)"],
    ),
    Wrong(
        "inline key twice",
        TINY + "[optim]\nx = { a = 1, a = 2 }\n",
        ["x.toml:4: not TOML: Duplicate inline table key 'a' (column 19)"],
    ),
    Wrong(
        "not UTF-8",
        b"[model]\n# caf\xe9\n",
        [
            "x.toml: cannot be read as TOML: 'utf-8' codec can't decode byte 0xe9 in position "
            "13: invalid continuation byte"
        ],
    ),
    Wrong("missing", {"xy.toml": TINY}, ["x.toml: No such file or directory"]),
    Wrong("folder", {"x.toml/a.toml": TINY}, ["x.toml: is a folder, not a plain file"]),
    Wrong(
        "deep",
        "x = " + "[" * 3000,
        ["x.toml: cannot be read as TOML: line 1 nests brackets deeper than 16"],
    ),
    Wrong(
        "missing base",
        {"x.toml": '\nbase = "sub/y.toml"\n'},
        ["x.toml:2: base cannot be read: sub/y.toml: No such file or directory"],
    ),
    Wrong(
        "base of a base",
        {"x.toml": 'base = "sub/y.toml"\n', "sub/y.toml": '\n\nbase = "z.toml"\n'},
        ["sub/y.toml:3: base cannot be read: sub/z.toml: No such file or directory"],
    ),
    Wrong(
        "circle",
        {"x.toml": 'base = "y.toml"\n', "y.toml": '# b\nbase = "x.toml"\n'},
        ['y.toml:2: base = "x.toml" makes a cycle; remove one base'],
    ),
    Wrong(
        "circle of one",
        'base = "x.toml"\n',
        ['x.toml:1: base = "x.toml" makes a cycle; remove one base'],
    ),
    Wrong(
        "two bases",
        'base = ["a.toml", "b.toml"]\n',
        ['x.toml:1: \'base\' must be the path of one recipe, got ["a.toml", "b.toml"]'],
    ),
    Wrong(
        "empty base", 'base = ""\n', ["x.toml:1: 'base' must be the path of one recipe, got \"\""]
    ),
    Wrong(
        "wrong in a base",
        {"x.toml": 'base = "sub/y.toml"\n' + TINY, "sub/y.toml": "[run]\nsteps = 1.5\n"},
        ["sub/y.toml:2: 'run.steps' must be int, got 1.5"],
    ),
    Wrong(
        "syntax in a base",
        {"x.toml": 'base = "y.toml"\n', "y.toml": "[run\n"},
        ["y.toml:1: not TOML: Expected ']' at the end of a table declaration (column 5)"],
    ),
]

ARCHITECTURES = [
    Wrong(
        "an architecture without a name",
        TINY + '[data]\nseq_len = "x"\n',
        [
            "x.toml:4: 'data.seq_len' must be int, got \"x\"",
            '--set model.architecture="": model.architecture = "" must be "llama", "moe", '
            '"olmo2", or "package.module:NAME" of at most 200 characters',
        ],
        sets=('model.architecture=""',),
    ),
    Wrong(
        "an architecture with a name that is too long",
        f'[model]\npreset = "debug-tiny"\narchitecture = "{"a" * 200}:A"\n',
        [
            f'x.toml:3: model.architecture = "{"a" * 200}:A" must be "llama", "moe", '
            '"olmo2", or "package.module:NAME" of at most 200 characters',
        ],
    ),
]


ALL = TYPES + NAMES + SETS + FILES + ARCHITECTURES
