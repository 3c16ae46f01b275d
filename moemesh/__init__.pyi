"""The public names, for editors and type checkers; moemesh/__init__.py imports them lazily."""

from moemesh.api import schedules as schedules
from moemesh.api.checkpoints import load_checkpoint as load_checkpoint
from moemesh.api.checkpoints import save_checkpoint as save_checkpoint
from moemesh.api.planning import estimate as estimate
from moemesh.api.planning import plan as plan
from moemesh.api.runs import load as load
from moemesh.api.training import parallelize as parallelize
from moemesh.balance.rebalance import rebalance_experts as rebalance_experts
from moemesh.checkpoint.store import Sharded as Sharded
from moemesh.comm.mesh import Mesh as Mesh
from moemesh.config.errors import ConfigError as ConfigError
from moemesh.parallel.expert.hub_layer import use_experts as use_experts
from moemesh.parallel.expert.layer import MoELayer as MoELayer
from moemesh.parallel.expert.spread import clip_grad_norm_ as clip_grad_norm_
from moemesh.parallel.expert.spread import expert_parameters as expert_parameters
from moemesh.parallel.expert.spread import full_state_dict as full_state_dict
from moemesh.planner.stages.partition import partition as partition
from moemesh.schedule.simulate import simulate as simulate
from moemesh.trace.run import Run as Run
from moemesh.train.from_python import train as train

__version__: str
