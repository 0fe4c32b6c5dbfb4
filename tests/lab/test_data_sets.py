"""The data sets as tensors: right cases in the right places. Real data where they are; CURVES always."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

import curves as first
from realdata import DATA, real
from shf.lab.data import DamagedDataError, DataError, MissingDataError, curves, load, usps
from shf.lab.data.catalogue import MNIST
from shf.lab.data.datasets import standardise_
from shf.lab.data.errors import SourceError
from shf.lab.data.fetching import fetch_original


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHF_DATA", raising=False)
    return tmp_path / "cache"


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def test_standardise() -> None:
    """Zero mean on the training part, variance v / (v + 0.01); the test part by the same figures; constants to 0."""
    stream = np.random.default_rng(0)
    raw = stream.normal(3.0, [0.01, 0.5, 2.0], size=(4000, 3)).astype(np.float32)
    raw = np.hstack([raw, np.full((4000, 1), 0.25, np.float32)])
    train, test = raw[:3000].copy(), raw[3000:].copy()
    standardise_(train, test)
    variance = raw[:3000].var(axis=0, dtype=np.float64)
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(train.var(axis=0), variance / (variance + 0.01), rtol=1e-4)
    expected = (raw[3000:] - raw[:3000].mean(axis=0)) / np.sqrt(variance + 0.01)
    np.testing.assert_allclose(test, expected, atol=1e-4)
    assert not train[:, 3].any()


class TestMnist:
    def test_classifier(self) -> None:
        data = load("mnist", data_dir=real("mnist"))
        assert data.train_inputs.shape == (60_000, 784)
        assert data.test_inputs.shape == (10_000, 784)
        assert data.train_inputs.dtype == torch.float32
        assert data.train_targets.dtype == torch.int64
        assert data.train_targets[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
        assert data.test_targets.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        assert data.train_inputs.mean(dim=0).abs().max() < 1e-4
        assert (data.image_shape, data.classes) == ((28, 28), 10)
        assert set(data.checksums) == {file.path for file in MNIST.files}

    def test_autoencoder_and_raw_pixels_are_the_file(self) -> None:
        """Pixels divided by 255, in order, against an independent reading of the file."""
        root = real("mnist")
        raw = gzip.decompress((root / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
        assert struct.unpack(">4I", raw[:16]) == (2051, 10_000, 28, 28)
        pixels = torch.tensor(list(raw[16 : 16 + 784 * 50])).reshape(50, 784) / 255
        data = load("mnist-autoencoder", data_dir=root, test=50)
        torch.testing.assert_close(data.test_inputs, pixels)
        assert data.train_inputs.shape == (60_000, 784)
        assert data.train_targets is data.train_inputs
        assert data.classes is None
        torch.testing.assert_close(load("mnist", data_dir=root, standardise=False, test=50).test_inputs, pixels)

    def test_subset_is_standardised_by_itself(self) -> None:
        data = load("mnist", data_dir=real("mnist"), train=200, test=20)
        assert (len(data.train_inputs), len(data.train_targets), len(data.test_targets)) == (200, 200, 20)
        assert data.train_inputs.mean(dim=0).abs().max() < 1e-5

    def test_damaged_file(self, tmp_path: Path) -> None:
        """Every truncation and flip is noticed: the message names the file and both checksums."""
        for file in MNIST.files:
            path = file.at(tmp_path)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(b"\0\0\x08\x03" + bytes(12)))
        with pytest.raises(DamagedDataError) as caught:
            load("mnist", data_dir=tmp_path)
        assert "train-images-idx3-ubyte.gz" in str(caught.value)
        assert MNIST.files[0].sha256 in str(caught.value)


class TestUsps:
    def test_the_five_permutations(self) -> None:
        splits = usps.permutations()
        assert splits.shape == (5, 1100)
        for split in splits:
            assert sorted(split) == list(range(1, 1101))
        assert len({tuple(split) for split in splits}) == 5
        assert splits[0, :5].tolist() == [297, 506, 740, 625, 504]

    def test_the_permutations_are_the_released_ones(self) -> None:
        path = DATA / "usps" / "usps_perms.mat"
        if not path.is_file():
            pytest.skip(f"{path} is not here: set SHF_DATA to a directory that has usps/usps_perms.mat")
        released = scipy.io.loadmat(path)
        for k in range(5):
            np.testing.assert_array_equal(usps.permutations()[k], released[f"perms{k + 1}"].ravel())

    @pytest.mark.parametrize("split", [1, 5])
    def test_split(self, split: int) -> None:
        """Row 10 i + d is image perm[i] of digit d, read here straight from the file, column-major."""
        root = real("usps")
        columns = scipy.io.loadmat(root / "usps" / "usps_all.mat")["data"]
        data = load("usps", data_dir=root, split=split, standardise=False)
        assert data.train_inputs.shape == (8000, 256)
        assert data.test_inputs.shape == (3000, 256)
        assert data.train_targets.bincount().tolist() == [800] * 10
        assert data.train_targets[1000:2000].bincount().tolist() == [100] * 10
        order = usps.permutations()[split - 1] - 1
        for inputs, images in ((data.train_inputs, order[:800]), (data.test_inputs, order[800:])):
            for case, digit in ((0, 1), (7, 0), (299, 9)):
                column = columns[:, images[case], 9 if digit == 0 else digit - 1]
                picture = torch.from_numpy(column.reshape(16, 16, order="F").astype(np.float32) / 255)
                torch.testing.assert_close(inputs[10 * case + digit].reshape(16, 16), picture)

    def test_standardised_by_default(self) -> None:
        data = load("usps", data_dir=real("usps"))
        assert data.train_inputs.mean(dim=0).abs().max() < 1e-4
        assert (data.image_shape, data.classes) == ((16, 16), 10)

    def test_no_sixth_split(self) -> None:
        with pytest.raises(ValueError, match="split=6"):
            load("usps", data_dir=real("usps"), split=6)


class TestReuters:
    def test_against_the_file(self) -> None:
        root = real("reuters")
        data = load("reuters", data_dir=root)
        file = scipy.io.loadmat(root / "reuters" / "Reuters21578.mat")
        assert data.train_inputs.layout == torch.sparse_csr
        assert (data.train_inputs.shape, data.test_inputs.shape) == ((5946, 18_933), (2347, 18_933))
        assert data.classes == 65
        assert len(data.train_targets.unique()) == 58
        test = file["testIdx"].ravel().astype(int) - 1
        terms = torch.from_numpy(np.log1p(file["fea"].tocsr()[test].toarray())).float()
        torch.testing.assert_close(data.test_inputs.to_dense(), terms)
        np.testing.assert_array_equal(data.test_targets, file["gnd"].ravel()[test] - 1)

    def test_training_rows_are_shuffled_by_seed(self) -> None:
        """The same documents with their categories, in an order of which no batch is of one category."""
        root = real("reuters")
        first, again, other = (load("reuters", data_dir=root, seed=seed) for seed in (0, 0, 1))
        assert torch.equal(first.train_targets, again.train_targets)
        assert not torch.equal(first.train_targets, other.train_targets)
        sums = [
            torch.sparse.sum(d.train_inputs.to_sparse_coo(), dim=1).to_dense() + 1e4 * d.train_targets
            for d in (first, other)
        ]
        torch.testing.assert_close(sums[0].sort().values, sums[1].sort().values)
        assert len(first.train_targets[:1000].unique()) > 20

    def test_subset(self) -> None:
        data = load("reuters", data_dir=real("reuters"), train=100, test=50)
        assert (data.train_inputs.shape[0], len(data.train_targets), data.test_inputs.shape[0]) == (100, 100, 50)


def packed(train: np.ndarray, test: np.ndarray) -> bytes:
    """A file like the original's."""
    file = io.BytesIO()
    scipy.io.savemat(file, {"bdata": train, "bdatatest": test})
    return file.getvalue()


class TestCurves:
    def test_the_first_version_against_its_definition(self) -> None:
        """A natural cubic spline written out for three points, and every distance, in float64."""
        points = np.random.default_rng(3).uniform(6, 21, size=(5, 3, 2))
        t = np.linspace(0, 1, 60)[:, None]
        for (a, b, c), image in zip(points, curves.painted(first.spline(points), 0.25), strict=True):
            bend = 6 * (a - 2 * b + c)  # second derivative at t = ½; it is 0 at both ends
            left = a + (b - a) * 2 * t + bend / 3 * (t**3 - t / 4)
            right = c + (b - c) * 2 * (1 - t) + bend / 3 * ((1 - t) ** 3 - (1 - t) / 4)
            self.compare(image, np.where(t <= 0.5, left, right), 0.85, 0.25)

    def test_the_second_version_against_its_definition(self) -> None:
        """A quadratic Bézier curve whose control point lies a fifth beyond b."""
        points = np.random.default_rng(3).uniform(6, 21, size=(5, 3, 2))
        t = np.linspace(0, 1, 60)[:, None]
        for (a, b, c), image in zip(points, curves.draw(points), strict=True):
            control = (a + c) / 2 + 1.2 * (b - (a + c) / 2)
            samples = (1 - t) ** 2 * a + 2 * t * (1 - t) * control + t**2 * c
            self.compare(image, samples, curves.RADIUS, curves.SOFTNESS)

    def compare(self, image: np.ndarray, samples: np.ndarray, radius: float, softness: float) -> None:
        pixels = np.stack(np.meshgrid(np.arange(28), np.arange(28)), axis=-1).reshape(784, 1, 2)
        distance = np.linalg.norm(pixels - samples, axis=-1).min(axis=1)
        np.testing.assert_allclose(image, 1 / (1 + np.exp((distance - radius) / softness)), atol=1e-4)

    def test_a_curve_goes_from_its_uppermost_point_to_its_lowest(self) -> None:
        points = curves.control_points(50, np.random.default_rng(1))
        assert (np.diff(points[:, :, 1], axis=1) >= 0).all()

    def test_calibration(self) -> None:
        """18 principal components leave within 5 % of the 5.90 that is published for the original's test images."""
        train, test = curves.generate(8000, 2000)
        assert abs(curves.pca_left(train, test) / 5.90 - 1) < 0.05

    def test_the_first_version_stays_as_it_was(self) -> None:
        images = first.first_version(4000, 1)[0]
        assert 5.9 < curves.pca_left(images, images) < 6.2

    def test_deterministic_and_nested(self) -> None:
        train, test = curves.generate(60, 40, seed=5)
        again, _ = curves.generate(60, 40, seed=5)
        fewer, fewer_test = curves.generate(20, 10, seed=5)
        np.testing.assert_array_equal(train, again)
        np.testing.assert_array_equal(fewer, train[:20])
        np.testing.assert_array_equal(fewer_test, test[:10])
        assert not np.array_equal(train, curves.generate(60, 40, seed=6)[0])
        assert not np.array_equal(train[:40], test)
        assert train.min() >= 0
        assert train.max() <= 1

    def test_load(self) -> None:
        data = load("curves", train=30, test=20, seed=2)
        assert (data.train_inputs.shape, data.test_inputs.shape) == ((30, 784), (20, 784))
        assert data.train_targets is data.train_inputs
        assert "not the paper's" in data.note
        assert data.checksums != load("curves", train=30, test=20, seed=3).checksums

    def test_kept_in_the_cache(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = load("curves", train=30, test=20)
        with monkeypatch.context() as patch:
            patch.setattr(curves, "generate", None)
            assert torch.equal(load("curves", train=30, test=20).test_inputs, first.test_inputs)
        (path,) = (cache / "curves").iterdir()
        good = path.read_bytes()
        for bad in (good[: len(good) // 2], good[:5000] + b"\xff" + good[5001:], b"", b"PK\x03\x04"):
            path.write_bytes(bad)
            assert torch.equal(load("curves", train=30, test=20).train_inputs, first.train_inputs)
            assert path.read_bytes() == good

    def test_hostile_cache_is_not_read(self, cache: Path, tmp_path: Path) -> None:
        """Arrays of objects in an .npz are pickles, and a small .npz may unpack to gigabytes: drawn again instead."""
        path = curves.cache_path(cache, 30, 20, 0)
        path.parent.mkdir(parents=True)
        marker = tmp_path / "ran"
        np.savez(path, train=np.array([Evil(marker)], dtype=object), test=np.zeros(1))
        assert load("curves", train=30, test=20).train_inputs.shape == (30, 784)
        assert not marker.exists()
        np.savez_compressed(path, train=np.zeros((30_000, 784), np.float32), test=np.zeros((20, 784), np.float32))
        tracemalloc.start()
        assert load("curves", train=30, test=20).train_inputs.shape == (30, 784)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 24

    def test_a_cache_that_cannot_be_written_is_no_obstacle(self, cache: Path) -> None:
        cache.write_text("a file, not a directory")
        with pytest.warns(UserWarning, match="not kept"):
            assert load("curves", train=30, test=20).train_inputs.shape == (30, 784)

    def test_original_file(self, tmp_path: Path) -> None:
        path = tmp_path / curves.ORIGINAL
        path.parent.mkdir()
        stream = np.random.default_rng(0)
        bdata, bdatatest = stream.random((6, 784)), stream.random((4, 784))
        scipy.io.savemat(path, {"bdata": bdata, "bdatatest": bdatatest, "other": np.zeros(3)}, do_compression=True)
        data = load("curves", data_dir=tmp_path, train=5)
        np.testing.assert_allclose(data.train_inputs, bdata[:5], rtol=1e-6)
        np.testing.assert_allclose(data.test_inputs, bdatatest, rtol=1e-6)
        assert data.note == "the original CURVES"
        assert len(data.checksums[curves.ORIGINAL]) == 64

    def test_the_original_is_fetched_checked_and_kept(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Images of the same kind stand for it; others, fewer, or none at its home are refused and leave nothing."""
        monkeypatch.setattr(curves, "TRAIN", 900)
        monkeypatch.setattr(curves, "TEST", 300)
        train, test = curves.generate(900, 300)
        monkeypatch.setattr(curves, "PCA_LEFT", curves.pca_left(train, test))
        heard: list[str] = []
        for bad in ((train[:800], test), (train, 0.5 * test), (train, train[:300] * 0 + 0.5)):
            content = packed(*bad)
            with pytest.raises(DamagedDataError, match="the original"):
                fetch_original(heard.append, get=lambda url, limit, content=content: content)
            assert not (cache / curves.ORIGINAL).exists()
        content = packed(train, test)
        path = fetch_original(heard.append, get=lambda url, limit: content)
        assert path == cache / curves.ORIGINAL
        assert heard[-1] == f"sha256 {hashlib.sha256(content).hexdigest()}"
        assert load("curves").checksums == {curves.ORIGINAL: hashlib.sha256(content).hexdigest()}

    def test_an_original_that_cannot_be_reached(self, cache: Path) -> None:
        def unreachable(url: str, limit: int) -> bytes:
            raise SourceError(f"{url}: no route")

        with pytest.raises(MissingDataError, match=r"could not be fetched: .*no route"):
            fetch_original(lambda _: None, get=unreachable)
        assert not (cache / curves.ORIGINAL).exists()

    @pytest.mark.parametrize(
        "variables",
        [
            {"bdata": np.zeros((6, 784))},
            {"bdata": np.zeros((6, 700)), "bdatatest": np.zeros((4, 784))},
            {"bdata": np.full((6, 784), np.nan), "bdatatest": np.zeros((4, 784))},
            {"bdata": np.full((6, 784), 255.0), "bdatatest": np.zeros((4, 784))},
            {"bdata": np.array([{}], dtype=object), "bdatatest": np.zeros((4, 784))},
        ],
        ids=["absent", "shape", "nan", "range", "objects"],
    )
    def test_other_file_in_its_place(self, variables: dict[str, np.ndarray], tmp_path: Path) -> None:
        path = tmp_path / curves.ORIGINAL
        path.parent.mkdir()
        scipy.io.savemat(path, variables)
        with pytest.raises(DamagedDataError, match=r"digs3pts_1\.mat"):
            load("curves", data_dir=tmp_path)


class TestRequests:
    @pytest.mark.parametrize("option", [{"train": 0}, {"test": -1}, {"train": 10**9}, {"seed": -1}])
    def test_bad_values(self, option: dict[str, int]) -> None:
        name, value = next(iter(option.items()))
        with pytest.raises(ValueError, match=rf"load\({name}={value}\)"):
            load("curves", **option)  # type: ignore[arg-type]

    def test_unknown_name(self) -> None:
        with pytest.raises(DataError, match="did you mean 'mnist'"):
            load("mnits")

    @pytest.mark.parametrize("name", ["curves", "reuters", "mnist-autoencoder"])
    def test_only_digits_are_standardised(self, name: str) -> None:
        with pytest.raises(ValueError, match="standardise"):
            load(name, standardise=True)
