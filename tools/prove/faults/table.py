"""All faults. Importing their modules fills the list."""

from tools.prove.faults import (  # noqa: F401
    convert,
    data,
    exchanges,
    experts,
    families,
    float8,
    latents,
    machines,
    model,
    muon,
    narrow,
    patterns,
    pipeline,
    prediction,
    resume,
    sinks,
    values,
    windows,
)
from tools.prove.faults.places import Fault, faults_so_far

FAULTS: list[Fault] = faults_so_far
