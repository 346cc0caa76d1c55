# All public names of composer3d. Type checkers read this file, and so does __init__.py, which
# imports the module of a name when it is first used. docs/library.md says what each name is.

from composer3d.data.loader import Batch as Batch
from composer3d.facts.errors import UserError as UserError
from composer3d.facts.ranges import between as between
from composer3d.facts.ranges import key as key
from composer3d.models.contract import IGNORE_INDEX as IGNORE_INDEX
from composer3d.models.contract import Decoder as Decoder
from composer3d.models.contract import DecoderBlock as DecoderBlock
from composer3d.models.contract import SequenceInfo as SequenceInfo
from composer3d.models.contract import ShardingPlan as ShardingPlan
from composer3d.models.layers.attention import attend_sdpa as attend_sdpa
from composer3d.models.layers.head import Head as Head
from composer3d.models.llama.model import First as First
from composer3d.models.registry import Architecture as Architecture
from composer3d.models.shape import DecoderShape as DecoderShape
from composer3d.models.table import Constant as Constant
from composer3d.models.table import Normal as Normal
from composer3d.parallel.compose import compose as compose
from composer3d.parallel.context.api import ring_attention as ring_attention
from composer3d.parallel.context.ownership import shard_sequence as shard_sequence
from composer3d.parallel.context.ownership import unshard_sequence as unshard_sequence
from composer3d.parallel.executor import StepShape as StepShape
from composer3d.parallel.stages import Stages as Stages
from composer3d.recipe.schema import CheckpointTable as CheckpointTable
from composer3d.recipe.schema import CompileTable as CompileTable
from composer3d.recipe.schema import DataTable as DataTable
from composer3d.recipe.schema import MemoryTable as MemoryTable
from composer3d.recipe.schema import MeshTable as MeshTable
from composer3d.recipe.schema import Model as Model
from composer3d.recipe.schema import OptimTable as OptimTable
from composer3d.recipe.schema import ParallelTable as ParallelTable
from composer3d.recipe.schema import PrecisionTable as PrecisionTable
from composer3d.recipe.schema import Recipe as Recipe
from composer3d.recipe.schema import RunTable as RunTable
from composer3d.recipe.tables import load_recipe as load_recipe
from composer3d.recipe.tables import make_recipe as make_recipe
from composer3d.recipe.tables import own_model as own_model
from composer3d.recipe.tables import preset as preset
from composer3d.runtime.environment import world_size as world_size
from composer3d.runtime.mesh import Mesh as Mesh
from composer3d.runtime.process_group import pick_device as pick_device
from composer3d.runtime.process_group import world as world
from composer3d.training.library import Checkpoints as Checkpoints
from composer3d.training.library import build_model as build_model
from composer3d.training.library import open_batches as open_batches
from composer3d.training.optim import learning_rate as learning_rate
from composer3d.training.optimizers import Optimizer as Optimizer
from composer3d.training.optimizers import build_stages_optimizer as build_stages_optimizer
from composer3d.training.step import compute_gradients as compute_gradients
from composer3d.training.step import update as update
from composer3d.training.step_values import StepValues as StepValues
from composer3d.verify.call import verify as verify
from composer3d.verify.judge import Verdict as Verdict

__version__: str
