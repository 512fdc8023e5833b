"""``samestep encode``: semantic ids for new items."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli._speak import spoken

__all__ = ["encode"]


def encode(
    run: Annotated[Path, typer.Argument(help="Folder of a finished semantic-ids run.")],
    embeddings: Annotated[list[str], typer.Argument(help="Embeddings of the items: files or globs.")],
    out: Annotated[Path, typer.Option(help="File to write, .parquet or .npy.")],
) -> None:
    """Give new items their semantic ids; published ids do not move.

    Example: samestep encode runs/mine new_items.parquet --out new_ids.parquet
    """
    with spoken():
        from samestep.recipes.semantic_ids.encoding import encode_file

        done = encode_file(run, embeddings, out)
        print(
            f"{out}: {done.n_items:,} items, {done.n_known:,} of them known to the run"
            + (f" ({done.n_changed:,} with other codes now; their ids stay)" if done.n_changed else "")
        )
