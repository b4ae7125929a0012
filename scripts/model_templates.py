"""What make new-model writes, by the kind of learning: a small model to be changed from there."""

from __future__ import annotations

KCONFIG = {}
KCONFIG["classify"] = """\
choice MODEL_CHOICE

config MODEL_{NAME}
\tbool "{name}"
\tselect MODEL_HAS_CONV
\tselect MODEL_ANY_IMAGE_SIZE
\thelp
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
\thelp
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
