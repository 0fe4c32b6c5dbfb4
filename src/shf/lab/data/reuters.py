"""Reuters-21578 as Deng Cai publishes it: 8293 documents, 65 categories, 18,933 term counts, the ModApté split."""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat
from scipy.sparse import csr_array

from .files import DataFile

HOME = "http://www.cad.zju.edu.cn/home/dengcai/Data/TextData.html"
FILE = DataFile(
    "reuters/Reuters21578.mat",
    896_756,
    "2e442026efc64cfbcd3a531b4bc99b21eed6c5463276dbfa69d096f91dd5c245",
    "http://www.cad.zju.edu.cn/home/dengcai/Data/Reuters21578/Reuters21578.mat",
)
CLASSES = 65

Part = tuple[csr_array, NDArray[np.int64]]


def read(root: Path, seed: int) -> tuple[Part, Part]:
    """((train terms, categories), (test terms, categories)), the terms log(1 + count) in float32.

    The file is sorted by category, and batches are cut from consecutive rows: the training rows are shuffled once,
    by ``seed``. The test rows keep their order.
    """
    found = loadmat(io.BytesIO(FILE.read(root)))  # type: ignore[arg-type]
    terms = csr_array(found["fea"]).log1p().astype(np.float32)
    terms.sort_indices()
    categories = found["gnd"].ravel().astype(np.int64) - 1
    train, test = (found[name].ravel().astype(np.int64) - 1 for name in ("trainIdx", "testIdx"))
    train = np.random.default_rng(seed).permutation(train)
    return (terms[train], categories[train]), (terms[test], categories[test])
