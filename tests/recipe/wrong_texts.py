"""Recipes that cannot be read: wrong types, unknown names, wrong overrides, unreadable files."""

from tests.recipe.wrong import TINY, Wrong

TYPES = [
    Wrong("str for int", TINY + '[mesh]\ntp = "four"\n', ["x.toml:4: 'mesh.tp'"]),
    Wrong("bool for int", TINY + "[mesh]\ntp = true\n", ["x.toml:4: 'mesh.tp'"]),
    Wrong("float for int", TINY + "[mesh]\ntp = 2.0\n", ["x.toml:4: 'mesh.tp'"]),
    Wrong(
        "int for bool", TINY + "[metrics]\ntensorboard = 1\n", ["x.toml:4: 'metrics.tensorboard'"]
    ),
    Wrong("int for str", TINY + "[run]\nname = 7\n", ["x.toml:4: 'run.name'"]),
    Wrong("bool for float", TINY + "[optim]\nlr = false\n", ["x.toml:4: 'optim.lr'"]),
    Wrong("nan", TINY + "[optim]\nlr = nan\n", ["x.toml:4: 'optim.lr'"]),
    Wrong("infinity", TINY + "[optim]\nclip = -inf\n", ["x.toml:4: 'optim.clip'"]),
    Wrong("int beyond float", TINY + f"[optim]\nlr = 1{'0' * 400}\n", ["x.toml:4: 'optim.lr'"]),
    Wrong(
        "int beyond 64 bits", TINY + "[run]\nseed = 9223372036854775808\n", ["x.toml:4: 'run.seed'"]
    ),
    Wrong("date", TINY + "[run]\nsteps = 2024-05-01 07:32:00\n", ["x.toml:4: 'run.steps'"]),
    Wrong(
        "not a choice", TINY + '[parallel]\nschedule = "1f1b"\n', ["x.toml:4: 'parallel.schedule'"]
    ),
    Wrong("not a number of choice", TINY + "[parallel]\nzero = 4\n", ["x.toml:4: 'parallel.zero'"]),
    Wrong("true is not 1", TINY + "[parallel]\nzero = true\n", ["x.toml:4: 'parallel.zero'"]),
    Wrong("short array", TINY + "[optim]\nbetas = [0.9]\n", ["x.toml:4: 'optim.betas'"]),
    Wrong(
        "array of wrong things",
        TINY + '[optim]\nbetas = [\n  0.9,\n  "a",\n]\n',
        ["x.toml:4: 'optim.betas'"],
    ),
    Wrong("optional str", TINY + "[data]\npath = 3\n", ["x.toml:4: 'data.path'"]),
    Wrong("optional int", TINY + '[optim]\ndecay = "late"\n', ["x.toml:4: 'optim.decay'"]),
    Wrong("table for int", TINY + "[mesh.tp]\nsize = 2\n", ["x.toml:3: 'mesh.tp'"]),
    Wrong("value for table", "mesh = 4\n" + TINY, ["x.toml:1: 'mesh'"]),
    Wrong("array of tables", TINY + "[[mesh]]\ntp = 2\n", ["x.toml:3: 'mesh'"]),
    Wrong("inline table", TINY + "mesh = { pp = 1 }\n", ["x.toml:3: unknown key 'model.mesh'"]),
    Wrong(
        "inline table at the top", 'mesh = { pp = 1, tp = "2" }\n' + TINY, ["x.toml:1: 'mesh.tp'"]
    ),
    Wrong(
        "array of any length",
        TINY + "[parallel]\nstages = [1, 2.5]\n",
        ["x.toml:4: 'parallel.stages'"],
    ),
    Wrong("dotted key", 'mesh.tp = "2"\n' + TINY, ["x.toml:1: 'mesh.tp'"]),
]

NAMES = [
    Wrong(
        "near a sibling",
        TINY + '[parallel]\nshedule = "1F1B"\n',
        ["x.toml:4: unknown key 'parallel.shedule'"],
    ),
    Wrong("in the wrong table", TINY + "[run]\nlr = 1e-3\n", ["x.toml:4: unknown key 'run.lr'"]),
    Wrong(
        "of two tables",
        TINY + "[mesh]\nmicro_batch = 2\nseed = 1\n",
        ["x.toml:4: unknown key 'mesh.micro_batch'", "x.toml:5: unknown key 'mesh.seed'"],
    ),
    Wrong("near nothing", TINY + "[mesh]\nzzz = 2\n", ["x.toml:4: unknown key 'mesh.zzz'"]),
    Wrong("without its table", "tp = 2\n" + TINY, ["x.toml:1: unknown key 'tp'"]),
    Wrong("unknown table", TINY + "[paralel]\nzero = 1\n", ["x.toml:3: unknown table 'paralel'"]),
    Wrong("table near nothing", TINY + "[zzz]\n", ["x.toml:3: unknown table 'zzz'"]),
    Wrong("top key near nothing", "qqq = 1\n" + TINY, ["x.toml:1: unknown key 'qqq'"]),
]

SETS = [
    Wrong("set: type", TINY, ["--set mesh.tp=four: 'mesh.tp'"], ("mesh.tp=four",)),
    Wrong("set: empty", TINY, ["--set mesh.tp=: 'mesh.tp'"], ("mesh.tp=",)),
    Wrong("set: quoted number", TINY, ["--set mesh.tp=\"2\": 'mesh.tp'"], ('mesh.tp="2"',)),
    Wrong(
        "set: choice",
        TINY,
        ["--set parallel.schedule=gpipe: 'parallel.schedule'"],
        ("parallel.schedule=gpipe",),
    ),
    Wrong(
        "set: more than a value", TINY, ["--set mesh.tp=1\\npp=2: 'mesh.tp'"], ("mesh.tp=1\npp=2",)
    ),
    Wrong("set: no value", TINY, ["--set mesh.tp: write it as table.key=value"], ("mesh.tp",)),
    Wrong("set: unknown", TINY, ["--set mesh.tpp=2: unknown key 'mesh.tpp'"], ("mesh.tpp=2",)),
    Wrong("set: no table", TINY, ["--set steps=2: write it as table.key=value"], ("steps=2",)),
    Wrong(
        "set: near a table",
        TINY,
        ["--set paralel.schedule=x: unknown key 'paralel.schedule'"],
        ("paralel.schedule=x",),
    ),
    Wrong("set: nothing near", TINY, ["--set z.z=x: unknown key 'z.z'"], ("z.z=x",)),
    Wrong("set: table", TINY, ["--set mesh=2: write it as table.key=value"], ("mesh=2",)),
    Wrong(
        "set: bytes", TINY, ["--set run.name=\\udcff: the text must be UTF-8"], ("run.name=\udcff",)
    ),
]

FILES = [
    Wrong("no value", TINY + "[mesh]\ntp =\n", ["x.toml:4: not TOML: Invalid value"]),
    Wrong("open string", TINY + '[run]\nname = "a\n', ["x.toml:4: not TOML: Illegal character"]),
    Wrong("key twice", TINY + "[mesh]\ntp = 1\ntp = 2\n", ["x.toml:5: not TOML: Cannot overwrite"]),
    Wrong(
        "table twice",
        TINY + "[mesh]\ntp = 1\n[mesh]\npp = 2\n",
        ["x.toml:5: not TOML: Cannot declare"],
    ),
    Wrong(
        "inline key twice",
        TINY + "[optim]\nx = { a = 1, a = 2 }\n",
        ["x.toml:4: not TOML: Duplicate inline"],
    ),
    Wrong("not UTF-8", b"[model]\n# caf\xe9\n", ["x.toml:"]),
    Wrong("missing", {"xy.toml": TINY}, ["x.toml: No such file or directory"]),
    Wrong("folder", {"x.toml/a.toml": TINY}, ["x.toml: is a folder, not a plain file"]),
    Wrong("deep", "x = " + "[" * 3000, ["x.toml:"]),
    Wrong("missing base", {"x.toml": '\nbase = "sub/y.toml"\n'}, ["x.toml:2: base"]),
    Wrong(
        "base of a base",
        {"x.toml": 'base = "sub/y.toml"\n', "sub/y.toml": '\n\nbase = "z.toml"\n'},
        ["sub/y.toml:3: base"],
    ),
    Wrong(
        "circle",
        {"x.toml": 'base = "y.toml"\n', "y.toml": '# b\nbase = "x.toml"\n'},
        ['y.toml:2: base = "x.toml"'],
    ),
    Wrong("circle of one", 'base = "x.toml"\n', ['x.toml:1: base = "x.toml"']),
    Wrong("two bases", 'base = ["a.toml", "b.toml"]\n', ["x.toml:1: 'base'"]),
    Wrong("empty base", 'base = ""\n', ["x.toml:1: 'base'"]),
    Wrong(
        "wrong in a base",
        {"x.toml": 'base = "sub/y.toml"\n' + TINY, "sub/y.toml": "[run]\nsteps = 1.5\n"},
        ["sub/y.toml:2: 'run.steps'"],
    ),
    Wrong(
        "syntax in a base",
        {"x.toml": 'base = "y.toml"\n', "y.toml": "[run\n"},
        ["y.toml:1: not TOML: Expected ']' at the end of a table declaration"],
    ),
]

ARCHITECTURES = [
    Wrong(
        "an architecture without a name",
        TINY + '[data]\nseq_len = "x"\n',
        ["x.toml:4: 'data.seq_len'", '--set model.architecture="": model.architecture = ""'],
        sets=('model.architecture=""',),
    ),
    Wrong(
        "an architecture with a name that is too long",
        f'[model]\npreset = "debug-tiny"\narchitecture = "{"a" * 200}:A"\n',
        ['x.toml:3: model.architecture = "'],
    ),
]


ALL = TYPES + NAMES + SETS + FILES + ARCHITECTURES
