"""What happens to the momentum history when the learning rate changes: policies, forms, and the Caffe2 update."""

from samestep.momentum import _table as _table
from samestep.momentum._apply import apply, check_pair, rescale
from samestep.momentum._forms import Form, form, group_form, register
from samestep.momentum._policies import (
    Policy,
    every_change,
    free,
    frozen,
    policy_from_dict,
    relative,
    threshold,
)
from samestep.momentum._velocity_sgd import VelocitySGD

__all__ = [
    "Form",
    "Policy",
    "VelocitySGD",
    "apply",
    "check_pair",
    "every_change",
    "form",
    "free",
    "frozen",
    "group_form",
    "policy_from_dict",
    "register",
    "relative",
    "rescale",
    "threshold",
]
