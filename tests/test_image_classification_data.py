"""Reading images: every form gives the same samples, and every fault is one error that names the file."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from samestep import launch, reduce
from samestep.errors import SpecError
from samestep.group import Group
from samestep.pooling import alone
from samestep.recipes.image_classification import data, idx, models
from samestep.recipes.image_classification.augment import Augment
from samestep.recipes.image_classification.source import as_images
from samestep.recipes.image_classification.spec import Spec
from samestep.sharding import ShardLoader

FASHION = Path(__file__).parents[2] / "shared" / "data" / "fashion_mnist"


def pixels(n: int = 10, height: int = 4, width: int = 5, channels: int | None = None) -> np.ndarray:
    shape = (n, height, width) if channels is None else (n, height, width, channels)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def labels(n: int = 10) -> np.ndarray:
    return (np.arange(n) % 3).astype(np.uint8)


def to_idx(array: np.ndarray) -> bytes:
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[array.dtype.str[1:]]
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


def write_idx_folder(folder: Path, packed: bool = False) -> Path:
    folder.mkdir()
    for name, n in (("train", 10), ("t10k", 4)):
        for kind, array in (("images-idx3", pixels(n)), ("labels-idx1", labels(n))):
            content = to_idx(array)
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_image_folder(folder: Path, n: int = 10) -> Path:
    for i, (image, label) in enumerate(zip(pixels(n), labels(n))):
        (folder / f"class-{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"class-{label}" / f"{i:03}.png")
    return folder


def read(**settings: object) -> data.Data:
    return data.read(Spec(**settings))


def test_the_built_in_digits_are_those_of_scikit_learn() -> None:
    found = read()
    datasets = pytest.importorskip("sklearn.datasets")
    original = datasets.load_digits()
    assert (len(found.train), len(found.test)) == (1438, 359)
    assert found.classes == tuple("0123456789")
    for samples in (found.train, found.test):
        images, numbers = samples[list(range(len(samples)))]
        assert (images[:, 0].numpy() == original.images[samples.rows]).all()
        assert (numbers.numpy() == original.target[samples.rows]).all()
    assert sorted([*found.train.rows, *found.test.rows]) == list(range(1797))


def test_every_form_gives_the_same_samples(tmp_path: Path) -> None:
    images, numbers = pixels(), labels()
    np.savez(tmp_path / "a.npz", images=images, labels=numbers)
    np.savez(
        tmp_path / "keras.npz",
        x_train=images,
        y_train=numbers[:, None],
        x_test=images[:4],
        y_test=numbers[:4],
    )
    np.save(tmp_path / "b.npy", images)
    np.save(tmp_path / "b_labels.npy", numbers)
    folder, packed = write_idx_folder(tmp_path / "idx"), write_idx_folder(tmp_path / "packed", packed=True)
    forms = [
        {"data": str(tmp_path / "a.npz")},
        {"data": str(tmp_path / "keras.npz")},
        {"data": str(tmp_path / "b.npy"), "labels": str(tmp_path / "b_labels.npy")},
        {"data": str(folder)},
        {"data": str(packed)},
        {"data": str(packed / "train-images-idx3-ubyte.gz")},
        {"data": str(write_image_folder(tmp_path / "files")), "grey": True},
    ]
    for form in forms:
        found = read(**form)
        both = [found.train, found.test] if "test and" in found.sources[0]["for"] else [found.train]
        rows = {}
        for samples in both:
            for i in range(len(samples)):
                image, label = samples[i]
                rows[image.numpy().tobytes()] = int(label)
        wanted = {image.tobytes(): int(label) for image, label in zip(images, numbers)}
        assert rows.items() <= wanted.items(), form
        assert found.train.images.shape == (1, 4, 5), form
    assert len(read(data=str(folder)).test) == len(read(data=str(tmp_path / "keras.npz")).test) == 4


def test_grey_images_have_plain_strides_and_so_have_their_gradients() -> None:
    # DDP warns on every worker of gradients with other strides than their weights.
    images, _ = read().train[list(range(32))]
    assert images.stride() == (64, 64, 8, 1)
    model = models.resnet((1, 8, 8), 10)
    model(images).square().sum().backward()
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


def test_test_data_win_and_their_classes_are_known(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        images=pixels(),
        labels=np.array(["b", "a"] * 5),
        x_test=pixels(2),
        y_test=["a", "a"],
    )
    np.savez(tmp_path / "t.npz", x=pixels(3), y=np.array(["b", "b", "a"]))
    found = read(data=str(tmp_path / "a.npz"), test_data=str(tmp_path / "t.npz"))
    assert found.classes == ("a", "b")
    assert found.test.labels.tolist() == [1, 1, 0]
    np.savez(tmp_path / "t.npz", x=pixels(3), y=np.array(["b", "c", "a"]))
    with pytest.raises(SpecError, match=r"t\.npz.*expected only classes of .*got c"):
        read(data=str(tmp_path / "a.npz"), test_data=str(tmp_path / "t.npz"))
    np.savez(tmp_path / "t.npz", x=pixels(3, 5, 5), y=np.array(["b", "b", "a"]))
    with pytest.raises(SpecError, match="uint8 of 1 x 4 x 5, got uint8 of 1 x 5 x 5"):
        read(data=str(tmp_path / "a.npz"), test_data=str(tmp_path / "t.npz"))


@given(
    n=st.integers(1, 4),
    height=st.integers(5, 7),
    width=st.integers(5, 7),
    channels=st.sampled_from([1, 3, 4]),
)
def test_channels_may_stand_first_or_last(n: int, height: int, width: int, channels: int) -> None:
    last = pixels(n, height, width, channels)
    first = np.ascontiguousarray(last.transpose(0, 3, 1, 2))
    one, two = as_images("x", last), as_images("x", first)
    assert one.shape == two.shape == (channels, height, width)
    assert (one.read(range(n)) == two.read(range(n))).all()
    assert one.facts() == two.facts()


@given(
    st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]), st.lists(st.integers(1, 4), min_size=1, max_size=4)
)
def test_idx_files_come_back(tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int]) -> None:
    path = tmp_path_factory.mktemp("idx") / "a-idx-ubyte"
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    path.write_bytes(to_idx(array))
    assert idx.read(path).dtype == array.dtype
    assert (idx.read(path) == array).all()


@pytest.mark.parametrize("cut", [0, 3, 7, 15, 16, 200, -1])
def test_an_idx_file_that_is_cut_off_is_named(tmp_path: Path, cut: int) -> None:
    content = to_idx(pixels())
    for path, whole in (
        (tmp_path / "a-idx3-ubyte", content),
        (tmp_path / "b-idx3-ubyte.gz", gzip.compress(content)),
    ):
        path.write_bytes(whole[:cut])
        with pytest.raises(SpecError, match=path.name):
            idx.read(path)
    longer = tmp_path / "c-idx3-ubyte"
    longer.write_bytes(content + b"\0")
    with pytest.raises(SpecError, match=r"expected 200 bytes for shape .10, 4, 5., got 201"):
        idx.read(longer)
    longer.write_bytes(b"\0\0\7\3" + content[4:])
    with pytest.raises(SpecError, match="expected an IDX file"):
        idx.read(longer)


def test_what_a_folder_of_idx_files_lacks_is_said(tmp_path: Path) -> None:
    folder = write_idx_folder(tmp_path / "idx")
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"the packed one beside it is not read")
    assert len(read(data=str(folder)).train) == 10
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SpecError, match="got no labels"):
        read(data=str(folder))
    (folder / "t10k-images-idx3-ubyte").unlink()
    assert len(read(data=str(folder)).test) == 2  # held out
    (folder / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(SpecError, match="expected train-labels-idx"):
        read(data=str(folder))


def test_labels_that_do_not_do(tmp_path: Path) -> None:
    for bad, fragment in [
        (labels(9), "expected 10 labels, one per image"),
        (labels() + 0.5, "integers or strings, got float64"),
        (np.zeros(10, dtype=int), "at least 2 classes"),
        (np.arange(10), "got none of 2 classes"),
    ]:
        np.savez(tmp_path / "a.npz", images=pixels(), labels=bad)
        with pytest.raises(SpecError, match=fragment) as caught:
            read(data=str(tmp_path / "a.npz"))
        assert "a.npz" in str(caught.value)


def test_arrays_that_do_not_do(tmp_path: Path) -> None:
    floats = pixels().astype(np.float64)
    floats[3, 1, 1] = np.nan
    for images, fragment in [
        (pixels().reshape(10, 20), "expected images of shape"),
        (pixels().astype(np.int64), "uint8 or floats, got int64"),
        (pixels(0), "at least one image"),
        (floats, "NaN or infinity in image 3"),
    ]:
        np.savez(tmp_path / "a.npz", images=images, labels=labels(len(images)))
        with pytest.raises(SpecError, match=fragment):
            read(data=str(tmp_path / "a.npz"))
    np.savez(tmp_path / "a.npz", pictures=pixels(), labels=labels())
    with pytest.raises(SpecError, match="got labels, pictures"):
        read(data=str(tmp_path / "a.npz"))
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    with pytest.raises(SpecError, match=r"a\.npz`: expected a whole"):
        read(data=str(tmp_path / "a.npz"))
    np.save(tmp_path / "b.npy", pixels())
    with pytest.raises(SpecError, match="Set labels="):
        read(data=str(tmp_path / "b.npy"))
    (tmp_path / "c.txt").write_text("")
    for name in ("c.txt", "none"):
        with pytest.raises(SpecError, match=name):
            read(data=str(tmp_path / name))


def test_image_folders_with_and_without_a_test_part(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "train")
    write_image_folder(tmp_path / "val", 4)
    (tmp_path / "train" / "class-0" / "notes.txt").write_text("no image")
    found = read(data=str(tmp_path))
    assert (len(found.train), len(found.test), found.train.images.shape) == (10, 4, (3, 4, 5))
    assert found.classes == ("class-0", "class-1", "class-2")
    assert found.sources[0]["note"] == "1 files that are no images were left out"
    assert read(data=str(tmp_path), image_size=2).train[0][0].shape == (3, 2, 2)
    whole = read(data=str(tmp_path), image_size=4, grey=True).train[0][0]
    image = pixels()[0]
    assert (whole[0].numpy() == image[:, :4]).all()  # 4 x 5 cut around the middle
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(SpecError, match=r"empty.*expected images"):
        read(data=str(tmp_path))
    with pytest.raises(SpecError, match="a folder of images per class"):
        read(data=str(tmp_path / "train" / "empty"))


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    samples = read(data=str(tmp_path)).train
    broken = sorted(tmp_path.rglob("*.png"))[samples.rows[-1]]
    content = broken.read_bytes()
    for bad in (content[:60], b"", b"GIF89a"):
        broken.write_bytes(bad)
        with pytest.raises(SpecError, match=f"{broken.name}.*cannot be decoded"):
            data.pixel_statistics(samples, (0, 1), alone)
    Image.fromarray(pixels(1, 9, 9)[0]).save(broken)
    with pytest.raises(SpecError, match=r"expected 5 x 4 pixels as in 000.png, got 9 x 9.*image_size"):
        data.pixel_statistics(samples, (0, 1), alone)


def statistics_on(group: Group, folder: str, broken: str) -> list[object]:
    said: list[object] = []
    for settings in ({}, {"data": folder}, {"data": broken}):
        samples = read(**settings).train
        try:
            mean, std = data.pixel_statistics(samples, (group.rank, group.world_size), reduce.pool(group))
            said.append((mean.tolist(), std.tolist()))
        except SpecError as error:
            said.append(str(error))
    return said


def test_pixel_statistics_do_not_depend_on_the_workers_and_a_fault_is_said_by_all(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "a")
    write_image_folder(tmp_path / "b")
    samples = read(data=str(tmp_path / "b")).train
    broken = sorted((tmp_path / "b").rglob("*.png"))[samples.rows[-1]]
    broken.write_bytes(b"")
    arguments = (str(tmp_path / "a"), str(tmp_path / "b"))
    one = statistics_on(Group.single(), *arguments)
    three = launch.run(statistics_on, 3, *arguments, timeout_seconds=120)
    assert all(each[:2] == one[:2] for each in three)
    assert all(broken.name in each[2] and each[2] == three[0][2] for each in three)
    images, _ = read().train[list(range(1438))]
    assert one[0][0] == pytest.approx([images.double().mean().item()], rel=1e-6)
    assert one[0][1] == pytest.approx([images.double().std(correction=0).item()], rel=1e-6)


def test_pixel_statistics_of_floats(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(3, 2, (10, 4, 5, 3))
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels(), x_test=images, y_test=labels())
    mean, std = data.pixel_statistics(read(data=str(tmp_path / "a.npz")).train, (0, 1), alone)
    assert mean.tolist() == pytest.approx(images.mean((0, 1, 2)).tolist(), rel=1e-6)
    assert std.tolist() == pytest.approx(images.std((0, 1, 2)).tolist(), rel=1e-6)


@given(shift=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_shifted_image_is_the_image_moved(shift: int, seed: int) -> None:
    image = torch.from_numpy(pixels()[0][None])
    padded = torch.nn.functional.pad(image, (shift,) * 4)
    moved, label = Augment(shift, flip=False)((image, 7), torch.Generator().manual_seed(seed))
    cuts = [
        padded[:, top : top + 4, left : left + 5]
        for top in range(2 * shift + 1)
        for left in range(2 * shift + 1)
    ]
    assert label == 7
    assert any(torch.equal(moved, cut) for cut in cuts)


def test_augmentation_is_keyed_by_the_sample_and_differs_between_epochs() -> None:
    samples = read().train

    def epochs(shards: int, processes: int) -> list[dict[int, bytes]]:
        place = type("Place", (), {"rank": 0, "world_size": 1})()
        with ShardLoader(
            samples, 64, shards, group=place, augment=Augment(2, True), num_workers=processes
        ) as loader:
            return [
                {
                    int(i): image.numpy().tobytes()
                    for step in loader
                    for shard in step
                    for i, image in zip(shard.sample_ids, shard.batch[0])
                }
                for _ in range(2)
            ]

    one, other = epochs(1, 0), epochs(4, 0)
    assert one == other
    assert len(one[0]) == len(samples)
    assert sum(one[0][i] != one[1][i] for i in one[0]) > 1000


def test_a_run_knows_its_data_again(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "a")
    np.savez(tmp_path / "a.npz", images=pixels(), labels=labels())
    before = [read(data=str(tmp_path / name)).train.fingerprint() for name in ("a", "a.npz")]
    again = [read(data=str(tmp_path / name)).train.fingerprint() for name in ("a", "a.npz")]
    np.savez(tmp_path / "a.npz", images=255 - pixels(), labels=labels())
    (tmp_path / "a" / "class-0" / "000.png").rename(tmp_path / "a" / "class-1" / "000.png")
    after = [read(data=str(tmp_path / name)).train.fingerprint() for name in ("a", "a.npz")]
    assert before == again
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.skipif(not FASHION.exists(), reason="no Fashion-MNIST beside the checkout")
def test_fashion_mnist_is_read() -> None:
    found = read(data=str(FASHION))
    assert (len(found.train), len(found.test)) == (60_000, 10_000)
    assert np.bincount(found.train.labels).tolist() == [6000] * 10
    mean, std = data.pixel_statistics(found.train, (0, 1), alone)
    # 0.2860 and 0.3530 of 255 are the figures that people use.
    assert float(mean) / 255 == pytest.approx(0.2860, abs=5e-5)
    assert float(std) / 255 == pytest.approx(0.3530, abs=5e-5)
