"""CIFAR-10, CIFAR-100 and Shakespeare as they are published, with the size and checksum of every file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from fedhen.data.storage import digest
from fedhen.errors import DataError

MISSING = "is missing"
CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class Files:
    """A data set as its authors publish it."""

    name: str
    url: str
    checksum: str
    """Of what the address gives: an archive, or the only data file."""
    folder: str
    """The folder in the archive; a single file is put into a folder of that name."""
    train: Mapping[str, str]
    """File -> checksum, in order."""
    test: Mapping[str, str]
    sizes: Mapping[str, int]
    """File -> bytes."""
    classes: int
    labels: int = 0
    """Label bytes before each image; the last one is the class."""
    mean: tuple[float, ...] = ()
    """Of the training pixels between 0 and 1, for each channel."""
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def archive(self) -> str:
        """The name of what the address gives."""
        return self.url.rpartition("/")[2]

    @property
    def packed(self) -> bool:
        """Whether the address gives an archive."""
        return self.archive.endswith(".tar.gz")

    @property
    def checksums(self) -> dict[str, str]:
        """The checksum of every data file."""
        return {**self.train, **self.test}


CIFAR10 = Files(
    name="cifar10",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    checksum="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    train={
        "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    },
    test={"test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c"},
    sizes={f"{name}.bin": 30_730_000 for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")},
    labels=1,
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    class_names=tuple(CIFAR10_CLASSES.split()),
)
CIFAR100 = Files(
    name="cifar100",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    checksum="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    train={"train.bin": "e207cd2e05b73b1393c74c7f5e7bea451d63e08e"},
    test={"test.bin": "8fb6623e830365ff53cf14adec797474f5478006"},
    sizes={"train.bin": 153_700_000, "test.bin": 30_740_000},
    labels=2,
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    class_names=tuple(CIFAR100_CLASSES.split()),
)
SHAKESPEARE = Files(
    name="shakespeare",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    checksum="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    folder="tinyshakespeare",
    train={"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    test={},
    sizes={"input.txt": 1_115_394},
    classes=65,
)
PUBLISHED = {files.name: files for files in (CIFAR10, CIFAR100, SHAKESPEARE)}
KINDS = {32: "MD5", 40: "SHA-1", 64: "SHA-256"}
"""Digits of a checksum -> its kind."""


def kind_of(checksum: str) -> str:
    """Returns the kind of a checksum, by its length: publishers differ in the kind that they give."""
    return KINDS[len(checksum)]


def verify(files: Files, root: Path) -> list[tuple[str, str | None]]:
    """Returns every data file with what is wrong with it, or None."""
    return [(name, find_problem(files, root / files.folder / name)) for name in files.checksums]


def find_problem(files: Files, path: Path) -> str | None:
    """Returns what is wrong with a data file, or None."""
    try:
        if (size := path.stat().st_size) != files.sizes[path.name]:
            return f"has {size} bytes instead of {files.sizes[path.name]}"
        kind = kind_of(checksum := files.checksums[path.name])
        return None if digest(path, kind) == checksum else f"was altered: its {kind} is not the published one"
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def require(files: Files, path: Path) -> None:
    """Raises a DataError that says how to get a data file, if something is wrong with it."""
    if wrong := find_problem(files, path):
        get = f"`fedhen data fetch {files.name} --to {quote(str(path.parent.parent))}`"
        raise DataError(
            f"{path} {wrong}: get it with {get}, or name the folder that holds {files.folder} with --data-dir or "
            "FEDHEN_DATA, from Python with data_dir=..."
        )
