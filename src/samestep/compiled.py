"""What torch.compile does behind a model's back, and how a step keeps it from deciding bits.

The compiler makes a kernel for the first shape it meets and, at the second, one for all shapes, with other bits.
Which shapes a worker meets, and in which order, depends on the number of workers. So in exact mode each shape has
a kernel of its own (``torch.compile(dynamic=True)`` has one for all from the start, which is as good). Past its
limit of kernels the compiler silently goes on without any; that is refused.

A trial of the loss function runs without the compiler: it would keep kernels for the trial's shapes, and a function
that it first meets under a dispatch mode it never compiles again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from samestep.errors import SpecError

__all__ = ["as_if_not", "by_shape"]


def as_if_not() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run as they were written, and nothing is compiled."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


@contextmanager
def by_shape() -> Iterator[None]:
    """In this context the kernel of a compiled function depends on nothing but the shapes of its inputs.

    Raises:
        SpecError: when a compiled function met more shapes than the compiler keeps kernels for.
    """
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled
        yield
        return
    from torch._dynamo import config, exc

    try:
        with config.patch(automatic_dynamic_shapes=False, fail_on_recompile_limit_hit=True):
            yield
    except exc.FailOnRecompileLimitHit as error:
        raise SpecError(
            f"`model`: exact mode keeps one compiled kernel per shape of its inputs, and more than "
            f"{config.recompile_limit} shapes came. Use torch.compile(dynamic=True), bring the shards to a few "
            "shapes, or raise torch._dynamo.config.recompile_limit.",
            name="model",
        ) from error
