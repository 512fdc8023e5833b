"""Start the workers of a command on this machine the way torchrun does: torch's elastic agent, in this process.

::

    samestep train ... --workers 4
      └─ agent (this process) ── python -m ... rank 0
                              ├─ python -m ... rank 1      each finds torchrun's variables in its environment
                              └─ ...

The agent watches the workers, stops all when one fails, starts them again when it may, and says in one line which
one failed and how. A signal to it goes on to all workers, and when it dies they die with it. Under torchrun itself
nothing is started: the command is then already one of the workers.
"""

from samestep.agent._command import check_port, run_command
from samestep.agent._worker import AGENT_VARIABLE, die_with_agent, is_worker

__all__ = ["AGENT_VARIABLE", "check_port", "die_with_agent", "is_worker", "run_command"]
