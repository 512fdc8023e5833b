"""What torch's DDP lets pass in silence: parameters frozen, unfrozen, added or replaced after wrapping.

DDP looks at the parameters once. One that is added or replaced later is never reduced, and the replicas part
without a message. The watch looks again at the start of every step, in a few microseconds.
"""

from __future__ import annotations

from torch import nn

__all__ = ["ModelWatch"]


class ModelWatch:
    """Remembers a model's parameters and says what has changed.

    Args:
        model: as it was wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.named_modules())
        self._sizes = [(len(m._parameters), len(m._modules)) for _, m in self._modules]
        self._places = [
            (module, key, parameter, parameter.requires_grad, f"{prefix}.{key}" if prefix else key)
            for prefix, module in self._modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def change(self) -> str:
        """Return in words what has changed since the model was wrapped; empty when nothing has."""
        for module, key, parameter, trainable, name in self._places:
            now = module._parameters.get(key)
            if now is not parameter:
                return f"parameter `{name}` was replaced"
            if now.requires_grad != trainable:
                return f"parameter `{name}` was {'frozen' if trainable else 'unfrozen'}"
        for (prefix, module), sizes in zip(self._modules, self._sizes):
            if (len(module._parameters), len(module._modules)) != sizes:
                return f"a parameter or module was added to or removed from `{prefix or 'the model'}`"
        return ""
