"""How often a step waits for its device does not grow, and docs/performance.md says what tools/waits.py counts."""

import runpy
from pathlib import Path

import pytest
import torch

import pretend

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"


@pytest.fixture(autouse=True)
def _pretends(device):
    if device.type != pretend.NAME:
        pytest.skip("waits are counted on the pretend device")


def test_the_page_has_the_table_that_is_counted():
    table = runpy.run_path(str(ROOT / "tools" / "waits.py"))["table"]()
    assert PAGE.read_text(encoding="utf-8").partition("<!-- waits -->\n\n")[2].partition("\n\n<!-- end -->")[0] == table


def test_each_kind_of_waiting_is_counted(device):
    there = torch.arange(4.0, device=device)
    operations = {
        "item": there[0].item,
        "float": lambda: float(there[0]),
        "bool": lambda: bool(there.any()),
        "list": there.tolist,
        "cpu": there.cpu,
        "numpy": lambda: there.cpu().numpy(),
        "equal": lambda: torch.equal(there, there),
        "nonzero": there.nonzero,
        "mask": lambda: there[there > 1],
        "masked_select": lambda: there.masked_select(there > 1),
        "unique": there.unique,
        "allclose": lambda: torch.allclose(there, there),
        "sent": lambda: torch.tensor([1.0], device=device),
        "indices of the CPU": lambda: there[torch.tensor([1, 2])],
        "put by a mask": lambda: there.clone().index_put_((there > 1,), there[0]),
    }
    for name, operation in operations.items():
        with pretend.waits() as seen:
            operation()
        assert len(seen) == 1, name


def test_what_stays_on_the_device_waits_for_nothing(device):
    there = torch.arange(4.0, device=device, requires_grad=True)
    with pretend.waits() as seen:
        torch.dot(there, there).sqrt().backward()
        (there.detach() * 2 + torch.tensor(1.0)).view(2, 2).t()[0].clamp_(0, 1)
        torch.cat([there, there])[2:].to(torch.float64).uniform_()
    assert not seen


def test_random_numbers_of_the_device_are_drawn_there(device):
    before = torch.get_rng_state()
    torch.manual_seed(3)
    first = torch.rand(3, device=device)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3, device=device), first)
    torch.set_rng_state(before)
    source = torch.Generator(device).manual_seed(1)
    assert source.device == device
    torch.rand(3, device=device, generator=source)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=device, generator=torch.Generator())
