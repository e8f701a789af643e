"""A user's own images and arrays: what is read is what was saved, and what cannot be read is named in one line."""

from __future__ import annotations

import pickle
import sys
import zipfile
import zlib
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedhen.config.data_settings import DataConfig
from fedhen.data.npz import ARRAYS
from fedhen.data.pixels import IMAGES_AT_ONCE
from fedhen.data.sources import load_data, read_own_data
from fedhen.errors import FedhenError

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(0)


def pixels(*shape: int) -> Array:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, image: Array) -> Array:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return image


def refused(path: Path) -> str:
    with pytest.raises(FedhenError) as error:
        read_own_data(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Grey 5×4 images of two classes: four a class for training, one a class for testing."""
    for part, number in (("train", 4), ("test", 1)):
        for name in ("dog", "cat"):
            for k in range(number):
                save(tmp_path / part / name / f"{k}.png", pixels(4, 5))
    return tmp_path


# Folders


def test_grey_images_are_read_as_they_are_with_labels_in_the_order_of_names(folder: Path) -> None:
    data = read_own_data(folder)
    assert data.x.shape == (8, 1, 4, 5) and data.x_test.shape == (2, 1, 4, 5) and data.x.dtype == torch.uint8
    assert data.classes == 2
    for part, x, y in (("train", data.x, data.y), ("test", data.x_test, data.y_test)):
        saved = {
            np.asarray(Image.open(file)).tobytes(): label
            for label, name in enumerate(("cat", "dog"))
            for file in (folder / part / name).iterdir()
        }
        assert {image.numpy().tobytes(): int(label) for image, label in zip(x, y, strict=True)} == saved
    values = data.x.numpy().astype(float)
    assert data.normalisation is not None
    assert data.normalisation.mean == pytest.approx([values.mean()])
    assert data.normalisation.std == pytest.approx([values.std()])


def test_the_order_mixes_the_classes_and_is_always_the_same(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in "ab":
            for k in range(50):
                save(tmp_path / part / name / f"{k}.png", pixels(2, 2))
    first, second = read_own_data(tmp_path), read_own_data(tmp_path)
    assert torch.equal(first.x, second.x) and torch.equal(first.y, second.y)
    assert set(first.y[:20].tolist()) == set(first.y_test[:20].tolist()) == {0, 1}
    some = load_data(DataConfig(name=str(tmp_path), limit=20), tmp_path)
    assert torch.equal(some.y, first.y[:20])


def test_one_coloured_image_makes_all_of_them_rgb(folder: Path) -> None:
    colour = save(folder / "train" / "cat" / "colour.PNG", pixels(4, 5, 3))
    grey = np.asarray(Image.open(folder / "test" / "dog" / "0.png"))
    Image.fromarray(grey).convert("1").save(folder / "train" / "dog" / "two-tone.png")
    data = read_own_data(folder)
    assert data.x.shape == (10, 3, 4, 5)
    assert any(np.array_equal(image, colour.transpose(2, 0, 1)) for image in data.x.numpy())
    (dog,) = data.x_test[data.y_test == 1].numpy()
    assert np.array_equal(dog, np.stack([grey] * 3))
    values = data.x.numpy().astype(float)
    assert data.normalisation is not None
    assert data.normalisation.mean == pytest.approx(values.mean((0, 2, 3)))
    assert data.normalisation.std == pytest.approx(values.std((0, 2, 3)))


def test_jpeg_palettes_and_alpha_are_read_as_pillow_shows_them(tmp_path: Path) -> None:
    image = Image.fromarray(pixels(6, 6, 3))
    for part in ("train", "test"):
        (tmp_path / part / "one").mkdir(parents=True)
        image.save(tmp_path / part / "one" / "a.jpg")
    image.save(tmp_path / "train" / "one" / "b.jpeg")
    image.quantize(8).save(tmp_path / "train" / "one" / "c.png")
    image.convert("RGBA").save(tmp_path / "train" / "one" / "d.png")
    (tmp_path / "train" / "one" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / "one" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "readme.txt").write_text("not a class")
    data = read_own_data(tmp_path)
    expected = sorted(
        np.asarray(Image.open(tmp_path / "train" / "one" / name).convert("RGB")).transpose(2, 0, 1).tobytes()
        for name in ("a.jpg", "b.jpeg", "c.png", "d.png")
    )
    assert sorted(each.tobytes() for each in data.x.numpy()) == expected


def test_a_constant_channel_is_shifted_but_not_divided_by_zero(tmp_path: Path) -> None:
    for part in ("train", "test"):
        save(tmp_path / part / "one" / "flat.png", np.full((3, 3), 7, np.uint8))
    data = read_own_data(tmp_path)
    assert data.normalisation is not None and data.normalisation.std == (1.0,)
    assert data.inputs(slice(None)).tolist() == [[[[0.0] * 3] * 3]]


def test_an_image_of_another_size_is_named(folder: Path) -> None:
    save(folder / "test" / "cat" / "wide.png", pixels(4, 6))
    said = refused(folder)
    assert f"{folder / 'test' / 'cat' / 'wide.png'} is 6×4 pixels, the others 5×4" in said and "data.size=64" in said


def test_images_of_unequal_size_are_resized_on_demand(folder: Path) -> None:
    wide = save(folder / "test" / "bird" / "wide.png", pixels(6, 12))
    save(folder / "train" / "bird" / "flat.png", np.full((3, 7), 9, np.uint8))
    data = load_data(DataConfig(name=str(folder), size=6), folder)
    assert data.x.shape == (9, 1, 6, 6) and data.x_test.shape == (3, 1, 6, 6)
    (bird,) = data.x_test[data.y_test == 0].numpy()
    assert np.array_equal(bird[0], np.asarray(Image.fromarray(wide).resize((6, 6), Image.Resampling.BILINEAR)))
    (flat,) = data.x[data.y == 0].numpy()
    assert (flat == 9).all()


def test_folders_that_do_not_fit_are_named(folder: Path) -> None:
    save(folder / "test" / "bird" / "0.png", pixels(4, 5))
    assert "class 'bird' appears in test/ but not in train/: remove it" in refused(folder)
    (folder / "test" / "bird" / "0.png").rename(folder / "test" / "bird" / "0.webp")
    (folder / "test" / "bird").rename(folder / "train" / "bird")
    assert f"{folder / 'train' / 'bird' / '0.webp'} is not a PNG or JPEG image" in refused(folder)
    (folder / "train" / "bird" / "0.webp").unlink()
    assert f"{folder / 'train' / 'bird'} contains no .png, .jpg, .jpeg image" in refused(folder)
    (folder / "train" / "bird").rmdir()
    (folder / "test").rename(folder / "tests")
    assert f"{folder / 'test'} does not exist" in refused(folder)
    (folder / "test").mkdir()
    assert f"{folder / 'test'} contains no folders" in refused(folder)


def chunk(kind: bytes, content: bytes) -> bytes:
    return pack(">I", len(content)) + kind + content + pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int) -> bytes:
    """A PNG that declares that size, and is a few bytes."""
    head = chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GIF89a", "is damaged, or not a PNG or JPEG image"),
        (b"", "is damaged, or not a PNG or JPEG image"),
        (b"truncated", "cannot be read"),
        (png_of(10_000, 10_000), "declares more than"),
        (png_of(60_000, 60_000), "declares more than"),
        (b"deep", "has more than 8 bits per pixel (mode I;16)"),
    ],
    ids=["other format", "empty", "truncated", "large", "bomb", "16 bits"],
)
def test_an_image_that_cannot_be_read_is_named(folder: Path, content: bytes, says: str) -> None:
    odd = folder / "train" / "dog" / "odd.png"
    save(odd, pixels(4, 5))
    if content == b"truncated":
        content = odd.read_bytes()[:60]
    if content == b"deep":
        Image.fromarray(pixels(4, 5).astype(np.uint16) * 256).save(odd)
    else:
        odd.write_bytes(content)
    assert refused(folder).startswith(f"{odd} {says}")


def test_without_pillow_one_line_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert refused(folder) == "images need Pillow: pip install 'fedhen[images]'"


# Arrays


def npz(path: Path, **changes: Any) -> Path:
    arrays: dict[str, Any] = {
        "x_train": pixels(6, 4, 5),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": pixels(3, 4, 5),
        "y_test": np.array([0, 1, 2]),
    }
    np.savez(path / "own.npz", **{name: value for name, value in {**arrays, **changes}.items() if value is not None})
    return path / "own.npz"


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3), (4, 5, 1), (3, 4, 5), (1, 4, 5)])
@pytest.mark.parametrize("kind", [np.uint8, np.float64, ">f4"])
def test_images_in_every_layout_become_channels_first(tmp_path: Path, shape: tuple[int, ...], kind: Any) -> None:
    x, x_test = pixels(6, *shape).astype(kind), pixels(3, *shape).astype(kind)
    data = read_own_data(npz(tmp_path, x_train=x, x_test=x_test))
    where = "nchw" if len(shape) == 2 or shape[0] in (1, 3) else "nhwc"
    full = x[:, None] if len(shape) == 2 else x
    expected = np.einsum(f"{where}->nchw", full.astype(np.float32))
    assert np.array_equal(data.x.numpy(), expected) and data.classes == 3
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2] and data.x_test.shape == (3, *expected.shape[1:])
    if kind is np.uint8:
        assert data.x.dtype == torch.uint8 and data.normalisation is not None
        assert data.normalisation.mean == pytest.approx(expected.mean((0, 2, 3)), rel=1e-5)
        assert data.normalisation.std == pytest.approx(expected.std((0, 2, 3)), rel=1e-5)
    else:
        assert data.x.dtype == torch.float32 and data.normalisation is None


def test_other_floats_keep_their_shape(tmp_path: Path) -> None:
    for shape in ((7,), (8, 2, 2), (2, 3, 2, 2)):
        x = RNG.normal(size=(6, *shape))
        data = read_own_data(npz(tmp_path, x_train=x, x_test=x[:3]))
        assert np.array_equal(data.x.numpy(), x.astype(np.float32)) and data.normalisation is None


def test_many_images_are_counted_in_pieces(tmp_path: Path) -> None:
    x = pixels(2 * IMAGES_AT_ONCE + 7, 3, 3)
    data = read_own_data(npz(tmp_path, x_train=x, y_train=np.arange(len(x)) % 3, x_test=x[:3]))
    assert data.normalisation is not None
    assert data.normalisation.mean == pytest.approx([x.mean()]) and data.normalisation.std == pytest.approx([x.std()])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x_test": None, "y_test": None}, "lacks x_test, y_test: it needs x_train, y_train, x_test, y_test"),
        ({"x_train": np.array([{}] * 6)}, "holds Python objects (pickles), which are not read"),
        ({"x_train": np.array(["a"] * 6)}, "x_train must be bytes (uint8) or floats, found <U1"),
        ({"x_train": pixels(6, 4, 5).astype(int)}, "x_train must be bytes (uint8) or floats, found int64"),
        ({"x_train": pixels(6, 20)}, "x_train must be images of shape"),
        ({"x_train": pixels(6, 4, 5, 4)}, "x_train must be images of shape"),
        ({"x_train": np.zeros(6)}, "x_train must be images of shape"),
        ({"x_train": np.full((6, 4, 5), np.nan)}, "x_train holds numbers that are not finite"),
        ({"x_test": np.zeros((3, 4, 5))}, "x_train and x_test have two types"),
        ({"x_test": pixels(3, 5, 4)}, "training inputs have shape (1, 4, 5), test inputs (1, 5, 4)"),
        ({"y_train": np.arange(5) % 3}, "6 inputs need as many targets"),
        (
            {"y_train": np.zeros((6, 1), int)},
            "y_train must be whole numbers of shape (n,), found int64 of shape (6, 1)",
        ),
        ({"y_train": np.zeros(6)}, "y_train must be whole numbers of shape (n,), found float64"),
        ({"y_train": np.array([1, 2, 3, 1, 2, 3])}, "y_train has 3 classes, so they must be 0 to 2, found 3"),
        ({"y_train": np.array([-1, 0, 1, 0, 1, 0])}, "y_train has 3 classes, so they must be 0 to 2, found -1"),
        ({"y_train": np.array([0, 1, 0, 1, 0, 1])}, "class 2 appears in y_test but not in y_train"),
        ({"x_train": pixels(0, 4, 5), "y_train": np.zeros(0, int), "y_test": np.zeros(0, int)}, "need as many targets"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = npz(tmp_path, **changes)
    text = refused(path)
    assert says in text and text.startswith(str(path))


def test_pickles_are_not_opened_and_unknown_files_are_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "evil").touch, ())

    path = tmp_path / "own.npz"
    path.write_bytes(pickle.dumps(Evil()))
    assert "holds Python objects (pickles), which are not read" in refused(path)
    with zipfile.ZipFile(path, "w") as file:
        for name in ARRAYS:
            file.writestr(f"{name}.npy", pickle.dumps(Evil()))
    assert refused(path) == f"{path}: x_train is not an array"
    assert not (tmp_path / "evil").exists()
    whole = npz(tmp_path).read_bytes()
    for content in (b"", b"something else", whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert "is not an .npz file, or is damaged" in refused(path) or "are not read" in refused(path)
    np.save(tmp_path / "one.npy", pixels(3))
    (tmp_path / "one.npy").rename(path)
    assert "is not an .npz file, or is damaged" in refused(path)
    path.rename(tmp_path / "own.csv")
    assert "which column is the target" in refused(tmp_path / "own.csv") or "UTF-8" in refused(tmp_path / "own.csv")
    (tmp_path / "own.csv").rename(tmp_path / "own.txt")
    assert "is neither a folder of images nor an .npz, .csv or .parquet file" in refused(tmp_path / "own.txt")
    assert "does not exist" in refused(tmp_path / "nowhere")
