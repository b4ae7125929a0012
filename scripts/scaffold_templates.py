"""What make new-model, new-task and new-data write: something small that trains, to be changed from there."""

from __future__ import annotations

KCONFIG = {}
KCONFIG["classify"] = """\
choice MODEL_CHOICE

config MODEL_{NAME}
\tbool "{name}"
\tselect MODEL_HAS_CONV
\tselect MODEL_ANY_IMAGE_SIZE
{selects}\thelp
\t  Two convolutions, pooling over the image and a linear layer.

endchoice

config MODEL
\tstring
\tdefault "{name}" if MODEL_{NAME}

# How much larger than the table's a micro-batch may be: 1.0 is careful; measure, then raise it.
config TABLE_SCALE
\tstring
\tdefault "1.0" if MODEL_{NAME}

config RECOMMENDED_TARGET
\tint
\tdefault 256 if MODEL_{NAME}

menu "{name}"
\tdepends on MODEL_{NAME}

config {NAME}_WIDTH
\tint "Channels of the first convolution"
\trange 1 1024
\tdefault {width}
\thelp
\t  The second convolution has twice as many.

endmenu
"""

KCONFIG["lm"] = """\
choice MODEL_CHOICE

config MODEL_{NAME}
\tbool "{name}"
\tselect MODEL_DATA_TEXT
{selects}\thelp
\t  An embedding, a convolution over the past and a linear layer.

endchoice

config MODEL
\tstring
\tdefault "{name}" if MODEL_{NAME}

# How much larger than the table's a micro-batch may be: 1.0 is careful; measure, then raise it.
config TABLE_SCALE
\tstring
\tdefault "1.0" if MODEL_{NAME}

config RECOMMENDED_TARGET
\tint
\tdefault 64 if MODEL_{NAME}

menu "{name}"
\tdepends on MODEL_{NAME}

config {NAME}_WIDTH
\tint "Channels"
\trange 1 1024
\tdefault {width}
\thelp
\t  Of the embedding and the convolution.

endmenu
"""

MODEL = {}
MODEL["classify"] = '''\
"""{name}: two convolutions, pooling over the image and a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from lib.data import ImageSpec

TASK = "{task}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/{name}/Kconfig."""

    width: int


def build(options: Options, spec: ImageSpec) -> nn.Module:
    """A network from (N, C, H, W) images of any size to (N, classes) logits."""
    return Network(options, spec=spec)


class Network(nn.Module):
    def __init__(self, options: Options, *, spec: ImageSpec) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(spec.channels, options.width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(options.width, 2 * options.width, 3, stride=2, padding=1)
        self.linear = nn.Linear(2 * options.width, spec.classes)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) images -> (N, classes) logits."""
        x_NCHW = F.relu(self.conv2(F.relu(self.conv1(x_NCHW))))
        logits_NK: Tensor = self.linear(x_NCHW.mean(dim=(2, 3)))
        return logits_NK
'''

MODEL["lm"] = '''\
"""{name}: an embedding, a convolution over the past and a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from lib.data import TextSpec

TASK = "{task}"

PAST = 4  # tokens that the convolution looks at, the present one among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/{name}/Kconfig."""

    width: int


def build(options: Options, spec: TextSpec) -> nn.Module:
    """A network from int64 (B, T) tokens to (B, T, V) logits of the tokens that follow."""
    return Network(options, spec=spec)


class Network(nn.Module):
    def __init__(self, options: Options, *, spec: TextSpec) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocab_size, options.width)
        self.past = nn.Conv1d(options.width, options.width, PAST)
        self.linear = nn.Linear(options.width, spec.vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 (B, T) -> (B, T, V) logits; no position sees a later one."""
        x_BCT = self.token(tokens_BT).transpose(1, 2)
        x_BCT = x_BCT + F.relu(self.past(F.pad(x_BCT, (PAST - 1, 0))))
        logits_BTV: Tensor = self.linear(x_BCT.transpose(1, 2))
        return logits_BTV
'''

TASK_KCONFIG = """\
# Selected by models whose task this is.
config MODEL_LEARNS_{NAME}
\tbool

config {NAME}_FOCUS
\tstring "Focus on samples that are hard"
\tdepends on MODEL_LEARNS_{NAME}
\tdefault "2.0"
\thelp
\t  Value: float, 0 <= x <= 10
\t  The loss of a sample is weighed by the chance that was given to the
\t  wrong classes, to this power. With 0 all weigh the same.
"""

TASK = '''\
"""{name}: classification that learns most from what is hard (focal loss, Lin et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import Spec
from train.tasks.base import Forward, Sums, full_precision
from train.tasks.classify.task import DATA, Classify, fault

__all__ = ["DATA", "SELECTS", "Options", "build", "fault"]

SELECTS = "MODEL_LEARNS_{NAME}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of train/tasks/{name}/Kconfig."""

    focus: float


def build(options: Options, _: Spec, *, config: Config) -> {Name}:
    """The task for such data, which are one of DATA."""
    return {Name}(options, label_smoothing=config.label_smoothing)


class {Name}(Classify):
    """Evaluated as classification is, so that figures compare."""

    def __init__(self, options: Options, *, label_smoothing: float) -> None:
        super().__init__(label_smoothing=label_smoothing)
        self.focus = options.focus

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Sums over the samples of a micro-batch; means are taken over the whole batch."""
        logits_NK = full_precision(forward(batch.inputs))
        loss_N = F.cross_entropy(
            logits_NK, batch.targets, reduction="none", label_smoothing=self.label_smoothing
        )
        weight_N = (1 - torch.exp(-loss_N.detach())) ** self.focus
        correct = (logits_NK.argmax(dim=1) == batch.targets).sum()
        return Sums((weight_N * loss_N).sum(), len(batch.targets), {{"accuracy": correct}})
'''

DATA_KCONFIG = """\
choice DATASET_CHOICE

config DATASET_{NAME}
\tbool "{name}"
\tdepends on MODEL_DATA_IMAGES
\thelp
\t  Stripes of ten directions in noise; 1x28x28, 10 classes, synthetic.

endchoice

config DATASET
\tstring
\tdefault "{name}" if DATASET_{NAME}

config {NAME}_TRAIN_SIZE
\tint "Images to train on"
\tdepends on DATASET_{NAME}
\trange 10 1000000
\tdefault 2000
\thelp
\t  They are drawn anew whenever the set is opened, always the same.
"""

DATA = '''\
"""{name}: stripes of ten directions in noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lib.data import ArrayPart, Dataset, ImageSpec, Place
from lib.data.metadata import outlined

TEST_SIZE = 500

SPEC = ImageSpec(
    name="{name}", channels=1, height=28, width=28, classes=10, mean=(0.5,), std=(0.25,), synthetic=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/{name}/Kconfig."""

    train_size: int


def outline(options: Options, place: Place) -> Dataset:
    """Spec and sizes, from as little as a plan can wait for. None where only the contents tell them."""
    return outlined(SPEC, options.train_size, TEST_SIZE, f"{{place.name}}: as it is generated")


def open_set(options: Options, place: Place) -> Dataset:
    """Both parts: inputs and targets. Files would be looked for in `place.files`."""
    train, test = _drawn(options.train_size, seed=1), _drawn(TEST_SIZE, seed=2)
    return Dataset(SPEC, train, test, f"{{place.name}}: {{train.size}} + {{test.size}} images, generated")


def _drawn(size: int, *, seed: int) -> ArrayPart:
    """uint8 (N, 1, 28, 28) images and int64 (N,) labels."""
    random = np.random.default_rng(seed)
    labels = np.arange(size, dtype=np.int64) % SPEC.classes
    angle = (np.pi / SPEC.classes * labels)[:, None, None]
    row, column = np.mgrid[: SPEC.height, : SPEC.width]
    phase = random.uniform(0, 2 * np.pi, (size, 1, 1))
    waves = np.sin(0.8 * (np.cos(angle) * row + np.sin(angle) * column) + phase)
    pixels = 127.5 + 80 * waves + random.normal(0, 30, waves.shape)
    return ArrayPart(pixels.clip(0, 255).astype(np.uint8)[:, None], labels)
'''
