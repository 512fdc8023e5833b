"""Start together: the same bits on every worker before the first step, also for values computed from data.

::

    model, optimizer = build()                        # whatever each worker drew, or rank 0 alone has loaded
    start.broadcast(model, optimizer, group=group)    # check the structure, copy, prove agreement

    start.mark(model.codebook)                        # at construction: state_dict says if it is initialized
    start.initialize(model.codebook, compute, group)  # once in the life of the model, also over resumes

For a loop that talks through gradients only there is the way of the first seed, made right: `initialization_loss`,
with `check_gradient_way` before the step and `check_landed` after it.
"""

from samestep.start._broadcast import broadcast
from samestep.start._gradient import check_gradient_way, check_landed, initialization_loss
from samestep.start._initialize import initialize
from samestep.start._mark import mark, needs_initialization

__all__ = [
    "broadcast",
    "check_gradient_way",
    "check_landed",
    "initialization_loss",
    "initialize",
    "mark",
    "needs_initialization",
]
