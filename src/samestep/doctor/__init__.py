"""Is this machine set up to run workers? What a newcomer runs first.

::

    this process ── versions, build, backends, devices, threads ─┐
    environment  ── launcher, port, network, other variables ────┼── findings: ok, note or problem, and what to do
    two workers  ── an all-reduce with a known answer ───────────┘

It looks and says; it changes no setting, and what it writes to try a folder it removes again.
"""

from __future__ import annotations

from samestep.doctor._examine import examine, exit_code
from samestep.doctor._finding import Finding

__all__ = ["Finding", "examine", "exit_code"]
