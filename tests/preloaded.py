"""What tasks of tests import, loaded once by the process that forks them; ``conftest`` names it.

A task that imported all of this itself would take 0.1 s of CPU time more.
"""
# ruff: noqa: F401

import numpy.ma  # numpy.unique imports it
import pytest

import composer3d.dryrun.stage
import composer3d.models.deepseek.model
import composer3d.models.deepseek.plan
import composer3d.models.gemma3.model
import composer3d.models.gemma3.plan
import composer3d.models.glm.model
import composer3d.models.glm.plan
import composer3d.models.gpt_oss.model
import composer3d.models.gpt_oss.plan
import composer3d.models.llama.model
import composer3d.models.llama.plan
import composer3d.models.moe.model
import composer3d.models.moe.plan
import composer3d.training.loop
import composer3d.training.optimizers.adamw
import composer3d.training.optimizers.adamw_proof
import composer3d.verify.worker
import tests.training.jobs
import tools.prove.paths
