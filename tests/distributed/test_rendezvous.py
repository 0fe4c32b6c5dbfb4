"""Processes of one start find each other in a store that still holds the words of an earlier start."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from shf.distributed.failure import Store
from shf.distributed.rendezvous import agree_on_start

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def start(store: Store, ranks: list[int], size: int) -> list[str]:
    """All ranks at once, begun in this order; with fewer workers than ranks they would wait for each other."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: agree_on_start(store, rank, size, timeout=600), ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_one_name(size: int) -> None:
    assert len(set(start(dist.HashStore(), list(range(size)), size))) == 1


def test_every_start_has_its_own_name() -> None:
    """Fails when a rank takes the first name that it finds: in half of the starts the last rank comes before rank 0."""
    store = dist.HashStore()
    names = [start(store, order, 3) for order in ([0, 1, 2], [2, 1, 0]) * 10]
    assert all(len(set(found)) == 1 for found in names)
    assert len({found[0] for found in names}) == 20


def test_the_words_of_an_earlier_start_do_not_count() -> None:
    """The earlier start broke off before its name was closed: rank 1 had answered, rank 2 had not come."""
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(TimeoutError, match=f"rank {rank}: not all of the 3 processes came within 0.1 s"):
            agree_on_start(store, rank, 3, timeout=0.1)
    with pytest.raises(TimeoutError, match="rank 2"):
        agree_on_start(store, 2, 3, timeout=0.1)
    assert len(set(start(store, [2, 1, 0], 3))) == 1


def test_another_number_of_processes() -> None:
    store = dist.HashStore()
    first, second = start(store, [0, 1, 2, 3], 4), start(store, [1, 0], 2)
    assert second[0] == second[1] != first[0]
