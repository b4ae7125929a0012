"""The published data sets: what they are, what their files are called, where they come from. Data only.

The hashes of the gzip and tar files are the published ones; the contents of MNIST were
compared with files from two independent sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib.data.types import ImageSpec


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to download: its name, its SHA-256, and the folders (URLs) that have it."""

    file: str
    sha256: str
    folders: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"{folder}/{self.file}" for folder in self.folders)


@dataclass(frozen=True, slots=True)
class IdxSet:
    """A set in four idx files, each gzipped or not."""

    spec: ImageSpec
    folders: tuple[str, ...]  # below DATA_DIR, in the order they are searched
    remotes: tuple[Remote, ...]


@dataclass(frozen=True, slots=True)
class BinarySet:
    """A set in the binary format of CIFAR."""

    spec: ImageSpec
    folders: tuple[str, ...]
    train: tuple[str, ...]  # files of the training part, any of which will do
    test: tuple[str, ...]  # files of the test part, whole or in part, the first of which is taken
    label_bytes: int
    train_size: int  # of the whole training part
    test_size: int
    remote: Remote


IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

_MNIST = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
)
_FASHION = ("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",)
_CIFAR = ("https://www.cs.toronto.edu/~kriz",)
_CIFAR10_MORE = ("https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets",)

# SHA-256 of the unpacked files.
MNIST_CONTENT = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def _idx_remotes(folders: tuple[str, ...], *hashes: str) -> tuple[Remote, ...]:
    return tuple(
        Remote(f"{name}.gz", sha256, folders) for name, sha256 in zip(IDX_FILES, hashes, strict=True)
    )


IDX_SETS = {
    "mnist": IdxSet(
        ImageSpec(
            name="mnist",
            channels=1,
            height=28,
            width=28,
            classes=10,
            mean=(0.1307,),
            std=(0.3081,),
            synthetic=False,
        ),
        ("mnist", "", "MNIST/raw"),
        _idx_remotes(
            _MNIST,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion_mnist": IdxSet(
        ImageSpec(
            name="fashion_mnist",
            channels=1,
            height=28,
            width=28,
            classes=10,
            mean=(0.2860,),
            std=(0.3530,),
            synthetic=False,
        ),
        ("fashion_mnist", "", "FashionMNIST/raw"),
        _idx_remotes(
            _FASHION,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
}

BINARY_SETS = {
    "cifar10": BinarySet(
        ImageSpec(
            name="cifar10",
            channels=3,
            height=32,
            width=32,
            classes=10,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            synthetic=False,
        ),
        ("cifar10", "cifar10/cifar-10-batches-bin", "", "cifar-10-batches-bin"),
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        ("test_batch.bin", "test_first1000.bin"),  # the second is ours: a part, and said to be one
        1,
        50_000,
        10_000,
        Remote(
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            _CIFAR + _CIFAR10_MORE,
        ),
    ),
    "cifar100": BinarySet(
        ImageSpec(
            name="cifar100",
            channels=3,
            height=32,
            width=32,
            classes=100,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            synthetic=False,
        ),
        ("cifar100", "cifar100/cifar-100-binary", "", "cifar-100-binary"),
        ("train.bin",),
        ("test.bin",),
        2,
        50_000,
        10_000,
        Remote(
            "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            _CIFAR,
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class TextSet:
    """A published text in a file for training and one for validation."""

    folders: tuple[str, ...]  # below DATA_DIR, in the order they are searched
    words: tuple[int, int]  # of the two, ends of lines included


# What the files of WikiText are called: no mirror with a published SHA-256 is known.
WIKITEXT_FILES = tuple(
    (name.format("train"), name.format("valid")) for name in ("wiki.{}.tokens", "wiki.{}.raw", "{}.txt")
)
WIKITEXT = {
    "wikitext2": TextSet(("wikitext2", "wikitext-2", "wikitext-2-raw", ""), (2_088_628, 217_646)),
    "wikitext103": TextSet(("wikitext103", "wikitext-103", "wikitext-103-raw", ""), (103_227_021, 217_646)),
}

SHAKESPEARE_FOLDERS = ("shakespeare", "tinyshakespeare", "")
SHAKESPEARE_REMOTES = (
    Remote(
        "input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",),
    ),
)
SHAKESPEARE_TRAIN_SHARE = 0.9  # of its characters, as nanoGPT has it

_SST2 = ("https://raw.githubusercontent.com/clairett/pytorch-sentiment-classification/master/data/SST2",)
SST2_FOLDERS = ("sst2", "SST-2", "SST2", "")
SST2_REMOTES = (
    Remote("train.tsv", "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920", _SST2),
    Remote("dev.tsv", "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359", _SST2),
)

_GPT2 = ("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main",)
GPT2_FOLDERS = ("gpt2_bpe", "gpt2", "")
GPT2_REMOTES = (
    Remote("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783", _GPT2),
    Remote("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5", _GPT2),
)
