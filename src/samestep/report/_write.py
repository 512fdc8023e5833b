"""Write the page of a run."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from samestep.report import _sections
from samestep.report._comparisons import comparisons
from samestep.report._files import Run, read

__all__ = ["write"]

_MAX_CONFIG_CHARS = 100_000


def write(run_folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The page needs no network and no script, adapts to dark mode and to a phone, and stays below 2 MB however long
    the run. It can be written while the run goes on; an earlier page is replaced in one move.

    Args:
        run_folder: holds any of ``manifest.json``, ``config.yaml``, ``metrics.jsonl``, ``audit.jsonl``,
            ``quality.json`` and ``comparison.json``. An absent file is an absent section; damaged lines are counted
            and named on the page.

    Returns:
        Path of the page.

    Raises:
        SpecError: when `run_folder` is no folder, or holds none of those files.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = Path(folder.name, "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}')
        >>> write(folder.name).name
        'report.html'
        >>> folder.cleanup()
    """
    folder = Path(run_folder)
    page = _page(read(folder))
    target, draft = folder / "report.html", folder / f".report.html.{os.getpid()}"
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def _page(run: Run) -> str:
    import jinja2

    source = files("samestep.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    charts, left_out = _sections.curves(run)
    config = run.config_text
    if len(config) > _MAX_CONFIG_CHARS:
        config = config[:_MAX_CONFIG_CHARS] + "\n... (cut here; the rest is in config.yaml)"
    return environment.from_string(source).render(
        name=run.name,
        finished=run.manifest is not None,
        notes=run.notes,
        facts=_sections.facts(run),
        figures=_sections.figures(run),
        charts=charts,
        left_out=left_out,
        audits=_sections.audits(run),
        comparisons=comparisons(run.comparison),
        ran=run.manifest is not None or bool(run.metrics or run.audit or run.config_text or run.quality),
        quality=_sections.quality(run),
        config=config,
    )
