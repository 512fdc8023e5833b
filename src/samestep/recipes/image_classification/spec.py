"""Settings of the `image-classification` recipe."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from samestep.recipes.spec import RunSpec

__all__ = ["ImageClassificationSpec", "Spec"]

_DECIDED_BY_SOLVER = (
    "reference_lr",
    "reference_batch_size",
    "scaling_rule",
    "decay",
    "milestones",
    "gamma",
    "warmup_epochs",
    "warmup_start_factor",
    "momentum",
    "nesterov",
    "momentum_form",
    "momentum_policy",
    "weight_decay",
    "bias_weight_decay",
    "norm_weight_decay",
    "bias_lr_factor",
    "second_lr_factor",
)


class ImageClassificationSpec(RunSpec):
    """Images in, a classifier trained by large-minibatch SGD and its figures on a test set out."""

    recipe: ClassVar[str] = "image-classification"
    paths: ClassVar[frozenset[str]] = frozenset({"data", "labels", "test_data", "test_labels", "solver"})
    lr_key: ClassVar[str] = "reference_lr"

    data: str | None = Field(
        None,
        description=".npz, .npy or IDX file, folder of IDX files or images; none for the built-in digits",
    )
    labels: str | None = Field(None, description="labels of a .npy or IDX file of images")
    test_data: str | None = Field(None, description="as data; by default the test part of data")
    test_labels: str | None = Field(None, description="labels of a .npy or IDX file of test images")
    test_share: float = Field(
        0.2, gt=0, lt=1, description="held out for the test when the data have no test part"
    )
    image_size: int | None = Field(
        None, ge=1, description="image folder: scale the shorter side, cut the middle"
    )
    grey: bool = Field(False, description="image folder: one channel instead of three")
    shift: int = Field(0, ge=0, description="augmentation: move by up to so many pixels each way")
    flip: bool = Field(False, description="augmentation: mirror left and right, every other time")
    loader_processes: int = Field(0, ge=0, description="processes of each worker that decode and augment")

    model: Literal["resnet", "mlp"] = "resnet"
    width: int = Field(16, ge=1, description="resnet: channels of the first stage; each stage doubles them")
    blocks: list[int] = Field([1, 1, 1], min_length=1, description="resnet: residual blocks of each stage")
    norm: Literal["batch", "group"] = Field(
        "batch", description="resnet: over a shard's samples, or over channels"
    )
    hidden: list[int] = Field([256], description="mlp: widths of the hidden layers")
    label_smoothing: float = Field(0.0, ge=0, lt=1)

    global_batch_size: int = Field(64, ge=1, description="samples of a step, over all workers")
    epochs: float = Field(20, gt=0, description="passes over the training samples, if steps is 0")
    steps: int = Field(0, ge=0, description="applied updates; 0 for as many as epochs come to")
    drop_last: bool = Field(True, description="leave out an epoch's last batch if it is short")
    evaluate_every: float = Field(1, ge=0, description="epochs between tests; 0 for one at the end")

    reference_lr: float = Field(0.05, gt=0, description="learning rate that suits reference_batch_size")
    reference_batch_size: int = Field(64, ge=1, description="samples of a step that reference_lr is for")
    scaling_rule: Literal["linear", "sqrt", "constant"] = Field(
        "linear", description="from the reference to the peak learning rate, by the ratio of the batches"
    )
    decay: Literal["cosine", "multistep", "constant"] = "cosine"
    milestones: list[float] = Field([], description="multistep: epochs after which the rate falls")
    gamma: float = Field(0.1, gt=0, description="multistep: by this factor")
    warmup_epochs: float = Field(
        5, ge=0, description="linear warm-up, where the batch is larger than the reference"
    )
    warmup_start_factor: float | None = Field(
        None, gt=0, le=1, description="of the peak rate; by default where the reference rate lies"
    )
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    momentum_form: Literal["gradient", "velocity"] = Field(
        "gradient", description="torch's SGD, or Caffe2's with the rate in the history"
    )
    momentum_policy: Literal["free", "frozen", "threshold", "relative", "every_change"] = Field(
        "free", description="what a changed rate does to the history"
    )
    weight_decay: float = Field(1e-4, ge=0, description="of weights")
    bias_weight_decay: float = Field(0.0, ge=0)
    norm_weight_decay: float = Field(0.0, ge=0)
    bias_lr_factor: float = Field(1.0, ge=0, description="2 in Detectron")
    second_lr_factor: float = Field(
        1.0, ge=0, description="rate of second_lr_params, as a factor on the others'"
    )
    second_lr_params: list[str] = Field(
        ["head.*"], description="patterns of parameter names on the second rate"
    )
    solver: str | None = Field(
        None, description="YAML of a Detectron-family trainer that decides the optimization"
    )
    clip_norm: float | None = Field(None, gt=0, description="bound on the norm of the mean gradient")

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if any(n < 1 for n in self.blocks):
            raise ValueError(f"`blocks`: expected at least 1 block per stage, got {self.blocks}")
        if any(n < 1 for n in self.hidden):
            raise ValueError(f"`hidden`: expected widths of at least 1, got {self.hidden}")
        if self.nesterov and self.momentum == 0 and self.solver is None:
            raise ValueError("`nesterov`: expected a momentum above 0 with it, got 0; set nesterov=false")
        if bool(self.milestones) != (self.decay == "multistep"):
            got = f"decay={self.decay} and milestones={self.milestones}"
            raise ValueError(f"`milestones`: expected them with decay=multistep, and only there, got {got}")
        if any(late <= early for early, late in pairwise([0.0, *self.milestones])):
            raise ValueError(f"`milestones`: expected growing epochs above 0, got {self.milestones}")
        if self.solver is not None:
            for key in _DECIDED_BY_SOLVER:
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(
                        f"`{key}`: expected none with `solver`, whose file decides it, got {getattr(self, key)!r}; "
                        "change a copy of the file"
                    )
        return self


Spec = ImageClassificationSpec
