"""Recipes that cannot be read: wrong types, unknown names, wrong overrides, unreadable files."""

from tests.recipe.wrong import TINY, Wrong

TYPES = [
    Wrong("str for int", TINY + '[mesh]\ntp = "four"\n'),
    Wrong("bool for int", TINY + "[mesh]\ntp = true\n"),
    Wrong("float for int", TINY + "[mesh]\ntp = 2.0\n"),
    Wrong("int for bool", TINY + "[metrics]\ntensorboard = 1\n"),
    Wrong("int for str", TINY + "[run]\nname = 7\n"),
    Wrong("bool for float", TINY + "[optim]\nlr = false\n"),
    Wrong("nan", TINY + "[optim]\nlr = nan\n"),
    Wrong("infinity", TINY + "[optim]\nclip = -inf\n"),
    Wrong("int beyond float", TINY + f"[optim]\nlr = 1{'0' * 400}\n"),
    Wrong("int beyond 64 bits", TINY + "[run]\nseed = 9223372036854775808\n"),
    Wrong("date", TINY + "[run]\nsteps = 2024-05-01 07:32:00\n"),
    Wrong("not a choice", TINY + '[parallel]\nschedule = "1f1b"\n'),
    Wrong("not a number of choice", TINY + "[parallel]\nzero = 4\n"),
    Wrong("true is not 1", TINY + "[parallel]\nzero = true\n"),
    Wrong("short array", TINY + "[optim]\nbetas = [0.9]\n"),
    Wrong("array of wrong things", TINY + '[optim]\nbetas = [\n  0.9,\n  "a",\n]\n'),
    Wrong("optional str", TINY + "[data]\npath = 3\n"),
    Wrong("optional int", TINY + '[optim]\ndecay = "late"\n'),
    Wrong("table for int", TINY + "[mesh.tp]\nsize = 2\n"),
    Wrong("value for table", "mesh = 4\n" + TINY),
    Wrong("array of tables", TINY + "[[mesh]]\ntp = 2\n"),
    Wrong("inline table", TINY + "mesh = { pp = 1 }\n"),
    Wrong("inline table at the top", 'mesh = { pp = 1, tp = "2" }\n' + TINY),
    Wrong("array of any length", TINY + "[parallel]\nstages = [1, 2.5]\n"),
    Wrong("dotted key", 'mesh.tp = "2"\n' + TINY),
]

NAMES = [
    Wrong("near a sibling", TINY + '[parallel]\nshedule = "1F1B"\n'),
    Wrong("in the wrong table", TINY + "[run]\nlr = 1e-3\n"),
    Wrong("of two tables", TINY + "[mesh]\nmicro_batch = 2\nseed = 1\n"),
    Wrong("near nothing", TINY + "[mesh]\nzzz = 2\n"),
    Wrong("without its table", "tp = 2\n" + TINY),
    Wrong("unknown table", TINY + "[paralel]\nzero = 1\n"),
    Wrong("table near nothing", TINY + "[zzz]\n"),
    Wrong("top key near nothing", "qqq = 1\n" + TINY),
]

SETS = [
    Wrong("set: type", TINY, sets=("mesh.tp=four",)),
    Wrong("set: empty", TINY, sets=("mesh.tp=",)),
    Wrong("set: quoted number", TINY, sets=('mesh.tp="2"',)),
    Wrong("set: choice", TINY, sets=("parallel.schedule=gpipe",)),
    Wrong("set: more than a value", TINY, sets=("mesh.tp=1\npp=2",)),
    Wrong("set: no value", TINY, sets=("mesh.tp",)),
    Wrong("set: unknown", TINY, sets=("mesh.tpp=2",)),
    Wrong("set: no table", TINY, sets=("steps=2",)),
    Wrong("set: near a table", TINY, sets=("paralel.schedule=x",)),
    Wrong("set: nothing near", TINY, sets=("z.z=x",)),
    Wrong("set: table", TINY, sets=("mesh=2",)),
    Wrong("set: bytes", TINY, sets=("run.name=\udcff",)),
]

FILES = [
    Wrong("no value", TINY + "[mesh]\ntp =\n"),
    Wrong("open string", TINY + '[run]\nname = "a\n'),
    Wrong("key twice", TINY + "[mesh]\ntp = 1\ntp = 2\n"),
    Wrong("table twice", TINY + "[mesh]\ntp = 1\n[mesh]\npp = 2\n"),
    Wrong("inline key twice", TINY + "[optim]\nx = { a = 1, a = 2 }\n"),
    Wrong("not UTF-8", b"[model]\n# caf\xe9\n"),
    Wrong("missing", {"xy.toml": TINY}),
    Wrong("folder", {"x.toml/a.toml": TINY}),
    Wrong("deep", "x = " + "[" * 3000),
    Wrong("missing base", {"x.toml": '\nbase = "sub/y.toml"\n'}),
    Wrong(
        "base of a base", {"x.toml": 'base = "sub/y.toml"\n', "sub/y.toml": '\n\nbase = "z.toml"\n'}
    ),
    Wrong("circle", {"x.toml": 'base = "y.toml"\n', "y.toml": '# b\nbase = "x.toml"\n'}),
    Wrong("circle of one", 'base = "x.toml"\n'),
    Wrong("two bases", 'base = ["a.toml", "b.toml"]\n'),
    Wrong("empty base", 'base = ""\n'),
    Wrong(
        "wrong in a base",
        {"x.toml": 'base = "sub/y.toml"\n' + TINY, "sub/y.toml": "[run]\nsteps = 1.5\n"},
    ),
    Wrong("syntax in a base", {"x.toml": 'base = "y.toml"\n', "y.toml": "[run\n"}),
]

ARCHITECTURES = [
    Wrong(
        "an architecture without a name",
        TINY + '[data]\nseq_len = "x"\n',
        sets=('model.architecture=""',),
    ),
    Wrong(
        "an architecture with a name that is too long",
        f'[model]\npreset = "debug-tiny"\narchitecture = "{"a" * 200}:A"\n',
    ),
]


ALL = TYPES + NAMES + SETS + FILES + ARCHITECTURES
