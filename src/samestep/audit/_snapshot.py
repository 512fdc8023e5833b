"""A moment's digests by phase and name, one word per phase, and values that people can read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep import fingerprint
from samestep.audit._cover import PHASES, State

__all__ = ["Snapshot", "take"]


@dataclass
class Snapshot:
    """Digests of one moment.

    Attributes:
        digests: 32 hexadecimal digits by phase and name, in registration order.
        left_out: names that are not covered, by reason.
    """

    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    _small: dict[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)

    def add(self, other: Snapshot) -> None:
        """Take over another moment's digests; its values win."""
        for phase, digests in other.digests.items():
            self.digests.setdefault(phase, {}).update(digests)
        for reason, names in other.left_out.items():
            known = self.left_out.setdefault(reason, [])
            known += [name for name in names if name not in known]
        self._small.update(other._small)

    def number(self, phase: str, name: str, value: int) -> None:
        """Add a plain number >= 0, which is its own digest."""
        self.digests.setdefault(phase, {})[name] = f"{value:032x}"
        self._small[phase, name] = torch.tensor(value)

    def words(self) -> list[int]:
        """Return one word in [0, 2**63) for every phase, in the order of `PHASES`."""
        return [_word(self.digests.get(phase, {})) for phase in PHASES]

    def named_words(self) -> dict[str, str]:
        """Return the words of the phases that hold anything, as 16 hexadecimal digits."""
        return {phase: f"{word:016x}" for phase, word in zip(PHASES, self.words()) if self.digests.get(phase)}

    def readable(self, phase: str) -> dict[str, list[str]]:
        """Return digest and readable value by name: the number itself where there is one, else 16 digits."""
        shown = {}
        for name, digest in self.digests.get(phase, {}).items():
            small = self._small.get((phase, name))
            shown[name] = [digest, digest[:16] if small is None else repr(small.item())]
        return shown


def take(state: State) -> Snapshot:
    """Return the digests of a state; one copy to the host per device."""
    flat = {
        f"{phase}\0{name}": tensor for phase, named in state.phases.items() for name, tensor in named.items()
    }
    snapshot = Snapshot(left_out=state.left_out)
    for key, digest in fingerprint.state(flat).items():
        phase, _, name = key.partition("\0")
        snapshot.digests.setdefault(phase, {})[name] = digest
        if flat[key].ndim == 0 and flat[key].device.type == "cpu" and phase != "gradients":
            snapshot._small[phase, name] = flat[key].detach()
    return snapshot


def _word(digests: Mapping[str, str]) -> int:
    # Names sorted: a resumed optimizer may hold the same state in another order.
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
