"""Lightning with the exact mean, an audit, values computed from all workers' data, and a resume that is exact.

::

    trainer = Trainer(strategy=ddp_strategy(), callbacks=[SamestepCallback(audit=100, exact_mean=True)], ...)
    trainer.fit(module)                    # train_dataloader: ShardDataLoader(dataset, 512, shards=8, trainer=...)
                                           # configure_optimizers: samestep.scheduler.LRScheduler, interval "step"

DDP and a single device, on CPU and CUDA; automatic and manual optimization. Sharded strategies are refused. The
function by which this project began, `scale_loss_by_world_size_for_initialization_training_loop`, is here too.
Needs the package ``lightning`` (``pip install 'samestep[lightning]'``).
"""

from __future__ import annotations

from samestep.lightning._callback import SamestepCallback
from samestep.lightning._initialization import Initialization
from samestep.lightning._loader import ShardDataLoader
from samestep.lightning._seed import scale_loss_by_world_size_for_initialization_training_loop
from samestep.lightning._workers import ddp_strategy

__all__ = [
    "Initialization",
    "SamestepCallback",
    "ShardDataLoader",
    "ddp_strategy",
    "scale_loss_by_world_size_for_initialization_training_loop",
]
