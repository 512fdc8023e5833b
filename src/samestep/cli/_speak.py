"""From an error to one message and an exit code, said once however many workers found it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from samestep.agent import AGENT_VARIABLE
from samestep.errors import SamestepError, WorkerError

__all__ = ["spoken"]


@contextmanager
def spoken() -> Iterator[None]:
    """Turn errors inside the block into a message on standard error and an exit code.

    Raises:
        typer.Exit: with the error's exit code.
    """
    try:
        yield
    except typer.Exit:
        raise
    except SamestepError as error:
        if _has_the_word(error):
            print(f"samestep: {_place(error)}{error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        if _rank() == 0:
            print("samestep: stopped by Ctrl-C. Go on with --resume.", file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception:
        print(f"samestep: {_where()}unexpected error\n{traceback.format_exc()}", file=sys.stderr)
        raise typer.Exit(3) from None


def _has_the_word(error: SamestepError) -> bool:
    """Return whether this worker is the one to say it; our own agent says which of its workers failed."""
    if error.common:
        return _rank() == 0
    return not (isinstance(error, WorkerError) and AGENT_VARIABLE in os.environ)


def _place(error: SamestepError) -> str:
    return "" if error.common else _where()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _where() -> str:
    world_size = os.environ.get("WORLD_SIZE", "1")
    return f"rank {_rank()} of {world_size}: " if world_size != "1" else ""
