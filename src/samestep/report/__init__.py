"""The page of a run: ``report.html``, one file that opens anywhere, without network and without scripts.

::

    manifest.json  config.yaml  metrics.jsonl  audit.jsonl  quality.json  comparison.json
          └─────────────┴────────── _files ──────┴───────────────┴──────────────┘
                                       │  what was found, and what was damaged
                         _sections ────┼──── _charts (SVG)
                                       v
                          report.html.j2 -> report.html

A file that is absent is a section that is absent; a run that is still going on gets a page too. Lines that cannot
be read are counted and named on the page: the report never fails on them and never hides them.
"""

from __future__ import annotations

from samestep.report._events import write_events
from samestep.report._write import write

__all__ = ["write", "write_events"]
