"""Fingerprints: 128-bit digests of tensors, cheap enough to take at every step.

A digest depends on the dtype, the shape and every bit (``-0.0`` and NaN payloads included) and on where each bit
stands, so that swapped rows, reshapes and paired flips show. It is computed on the tensor's own device with
integers only: the same tensor has the same digest on every device, whatever the number of threads.

::

    bytes, cut into rows of 4160, the last one padded with zeros
      row 0 ──┐
      row 1 ──┼── x KEYS (4160, 16) ──> 16 int32 per row ── again, while more than one row is left ──┐
      ...   ──┘                                                                                      v
                                             dtype, shape ── mix ──>  2 words of 64 bits  <── 16 int32

The keys are fixed small integers. A row sum is an exact integer, and no two rows of KEYS are multiples of each
other, so a change of one or two bytes within a row always shows; wider changes are missed with a chance of about
2**-100. The keys are public: this finds accidents, it does not stop an adversary. Nothing is copied to the host
before the final word. In host memory a small C kernel does the same sums, where the machine has a compiler and the
processor AVX-512 VNNI; elsewhere, and on accelerators, torch's integer product does.

Memory format is not part of a tensor's value: two tensors that are `torch.equal` bit for bit in the same dtype
and shape have one digest, whatever their strides.
"""

from samestep.fingerprint._names import named_state, named_tensors, named_values
from samestep.fingerprint._state import hexdigest, state, tensor, word

__all__ = ["hexdigest", "named_state", "named_tensors", "named_values", "state", "tensor", "word"]
