"""Recipes that can be read but break a rule, alone or several at once."""

import json

from tests.recipe.wrong import HF, SIZES, TINY, Wrong, shape
from tests.recipe.wrong_data import DATA, RUN
from tests.recipe.wrong_experts import EXPERTS
from tests.recipe.wrong_layouts import LAYOUTS

HF_BIASED = json.dumps(
    SIZES | {"model_type": "llama", "vocab_size": 300, "attention_bias": True, "mlp_bias": True}
)

MODEL = [
    Wrong("no model", "[run]\nsteps = 1\n"),
    Wrong("model lacks", "[run]\n[model]\ndim = 64\nn_layers = 2\nn_heads = 2\nvocab = 256\n"),
    Wrong("unknown preset", '[model]\npreset = "llama3-9b"\n'),
    Wrong("heads", shape(n_heads=12)),
    Wrong("odd heads", shape(dim=60, n_heads=4, n_kv_heads=4)),
    Wrong("odd dim", shape(dim=63, n_heads=1, n_kv_heads=1)),
    Wrong("kv heads", shape(n_kv_heads=3)),
    Wrong("no heads", shape(n_heads=0)),
    Wrong(
        # Heads need not fill dim if their width is given.
        "odd head_dim",
        shape(n_heads=12, n_kv_heads=3, head_dim=15),
    ),
    Wrong(
        "rope and window",
        TINY
        + "window = -1\nrope_factor = 0.5\nrope_low_freq = 0\n"
        + "rope_high_freq = -1\nrope_context = 0\n",
    ),
    Wrong("full blocks without a window", TINY + "full_every = 2\n"),
    Wrong(
        "periods that are longer than the model",
        TINY + "window = 8\nfull_every = 5\nnope_every = 6\n",
    ),
    Wrong(
        "a base of windows without windows",
        '[model]\narchitecture = "gemma3"\npreset = "debug-gemma3"\nwindow = 0\nfull_every = 0\n'
        "rope_local_theta = 77.0\n",
    ),
    Wrong("only full blocks", TINY + "window = 8\nfull_every = 1\nnope_every = -1\n"),
    Wrong("rope without a middle", TINY + "rope_low_freq = 4\n"),
    Wrong("a bound of another stretch", TINY + 'rope_scaling = "yarn"\nrope_low_freq = 2\n'),
    Wrong(
        "a linear stretch with the keys of others",
        TINY
        + 'rope_scaling = "linear"\nrope_factor = 2\nrope_context = 64\nrope_high_freq = 5\n'
        + "rope_beta_fast = 9\nrope_beta_slow = 2\nrope_truncate = false\n"
        + "rope_attention_factor = 1\n",
    ),
    Wrong(
        "yarn without pairs",
        TINY + 'rope_scaling = "yarn"\nrope_factor = 2\nrope_context = 1\nrope_beta_slow = 9\n',
    ),
    Wrong(
        "yarn the other way",
        TINY + 'rope_scaling = "yarn"\nrope_factor = 2\nrope_beta_slow = 33\n',
    ),
    Wrong(
        "yarn down to nothing",
        TINY + 'rope_scaling = "yarn"\nrope_factor = 4\nrope_beta_slow = 1e-310\n',
    ),
    Wrong(
        "dynamic and long",
        TINY + 'rope_scaling = "dynamic"\nrope_factor = 2\nrope_context = 63\n'
        "[data]\nseq_len = 64\n",
    ),
    Wrong("small vocab", shape(vocab=255)),
    Wrong("preset too small", TINY + "[mesh]\npp = 5\n"),
    Wrong("NUL in a folder", TINY + '[run]\nout_dir = "a\\u0000b"\n'),
    Wrong("no hf folder", '[run]\nsteps = 1\n[model]\nhf = "none"\n'),
    Wrong("hf is no JSON", {"x.toml": '[model]\nhf = "m"\n', "m/config.json": "hidden_size: 64"}),
    Wrong(
        "hf of another kind",
        {"x.toml": '[model]\nhf = "m"\n', "m/config.json": '{"model_type": "gpt2"}'},
    ),
    Wrong(
        "hf with experts",
        {"x.toml": '[model]\nhf = "m"\n', "m/config.json": '{"model_type": "mixtral"}'},
    ),
    Wrong(
        "hf without experts",
        {"x.toml": '[model]\narchitecture = "moe"\nhf = "m"\n', "m/config.json": HF},
    ),
    Wrong(
        "hf that does what we do not",
        {"x.toml": TINY, "m/config.json": HF_BIASED},
        sets=("model.hf=m",),
    ),
    Wrong(
        "hf and other first weights",
        {
            "x.toml": '[model]\nhf = "m"\n[checkpoint]\ninit = "c"\n',
            "m/config.json": HF,
            "c/manifest.json": "{}",
        },
    ),
    Wrong("preset for a whole shape", shape(), sets=("model.preset=debug-small",)),
    Wrong(
        "preset without a value that is written out",
        shape(head_dim=32, rope_attention_factor=1.5) + 'rope_scaling = "yarn"\n',
        sets=("model.preset=debug-tiny",),
    ),
    Wrong(
        "hf for a whole shape",
        {"x.toml": shape(vocab=300), "m/config.json": HF},
        sets=("model.hf=m", "model.n_kv_heads=2"),
    ),
    Wrong(
        "preset over a base with a whole shape",
        {"x.toml": 'base = "b.toml"\n[model]\npreset = "debug-small"\n', "b.toml": shape()},
    ),
    Wrong("hf and a rule", {"x.toml": '[model]\nhf = "m"\n[mesh]\npp = 3\n', "m/config.json": HF}),
]

MESH = [
    Wrong(
        "tp, heads from the base",
        {
            "x.toml": 'base = "sub/base.toml"\n\n[mesh]\ntp = 3\n',
            "sub/base.toml": shape(n_heads=32, n_kv_heads=32, ffn=192, vocab=768)
            + "[data]\nseq_len = 192\n",
        },
    ),
    Wrong("tp, all sizes", TINY + "[parallel]\nsequence_parallel = false\n", sets=("mesh.tp=3",)),
    Wrong(
        "tp, a vocabulary too small",
        shape(dim=128, n_heads=64, n_kv_heads=64, ffn=192, vocab=260) + "[mesh]\ntp = 64\n",
    ),
    Wrong(
        "tp, uneven vocabulary over uneven columns",
        TINY + "vocab = 257\n[mesh]\ntp = 2\ncp = 3\n[data]\nseq_len = 240\n",
    ),
    Wrong("tp, sequence", TINY + "[data]\nseq_len = 33\n[mesh]\ntp = 2\n"),
    Wrong("axis of zero", TINY + "[mesh]\npp = 0\ndp_shard = 0\n"),
    Wrong(
        "world", TINY + "[data]\nglobal_batch = 4\n[mesh]\npp = 2\ndp_shard = 2\ntp = 2\n", world=4
    ),
    Wrong("world, override", TINY + "[mesh]\npp = 2\ndp_shard = 1\n", sets=("mesh.tp=2",), world=2),
    Wrong("rest of the world", TINY + "[mesh]\ndp_shard = -1\npp = 2\ntp = 2\n", world=6),
    Wrong("zero 0", TINY + "[parallel]\nzero = 0\n", world=2),
]

BATCH = [
    Wrong("batch", TINY + "[data]\nglobal_batch = 6\nmicro_batch = 2\n[mesh]\ndp_shard = 2\n"),
    Wrong("batch by default", TINY + "[mesh]\ndp_shard = 16\n"),
    Wrong("1F1B", TINY + "[mesh]\npp = 4\ndp_shard = 2\n[data]\nglobal_batch = 4\n"),
    Wrong("no batch", TINY + "[data]\nglobal_batch = 0\nseq_len = -1\nmicro_batch = 0\n"),
]

SEVERAL = [
    Wrong(
        "one of each",
        {
            "x.toml": 'base = "y.toml"\n[mesh]\ntp = 3\n[parallel]\nshedule = "1F1B"\n',
            "y.toml": shape(n_heads=32, n_kv_heads=32, ffn=192, vocab=768)
            + '[run]\nsteps = "9"\n[data]\nseq_len = 192\n',
        },
        sets=("mesh.pp=two",),
        world=8,
    ),
    Wrong(
        "a wrong value is blamed once",
        shape(n_heads='"four"', dim=60, ffn=162) + "[mesh]\ntp = 4\n",
    ),
    Wrong(
        "a misspelt axis is not a wrong world", TINY + "[mesh]\ntps = 2\ndp_shard = 1\n", world=2
    ),
]


ALL = MODEL + MESH + LAYOUTS + EXPERTS + BATCH + RUN + DATA + SEVERAL
