"""Training: the optimizer, the step, the loop, and what it measures."""

from fp4jax.train.checkpoint import Checkpoints as Checkpoints
from fp4jax.train.checkpoint import Restored as Restored
from fp4jax.train.guards import SpikeDetector as SpikeDetector
from fp4jax.train.guards import make_diagnosis as make_diagnosis
from fp4jax.train.loop import evaluate as evaluate
from fp4jax.train.loop import train as train
from fp4jax.train.loop import train_phases as train_phases
from fp4jax.train.losses import Batch as Batch
from fp4jax.train.metrics import Evaluation as Evaluation
from fp4jax.train.metrics import JsonLines as JsonLines
from fp4jax.train.metrics import peak_flops as peak_flops
from fp4jax.train.optim import OptimConfig as OptimConfig
from fp4jax.train.optim import Optimizer as Optimizer
from fp4jax.train.optim import make_optimizer as make_optimizer
from fp4jax.train.optim import make_schedule as make_schedule
from fp4jax.train.progress import Progress as Progress
from fp4jax.train.state import TrainState as TrainState
from fp4jax.train.state import make_state as make_state
from fp4jax.train.step import make_eval_step as make_eval_step
from fp4jax.train.step import make_train_step as make_train_step
