"""What the docs say falls back does so inside a step and nowhere else; what they say is refused is."""

import warnings

import pytest
import torch

import shf
from limits import FALLS_BACK, REFUSED, vectors


@pytest.mark.parametrize("case", FALLS_BACK, ids=lambda case: case.what)
def test_a_fallback_is_inside_a_step_and_nowhere_else(case):
    torch.manual_seed(0)
    model = case.model(case.look)
    optimizer = shf.SHF(model, torch.nn.CrossEntropyLoss(), seed=0)
    data = vectors()
    with case.around(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(data[0])
        assert model.seen.pop() == case.outside
        optimizer.step(*data)
        optimizer.step(*data)
        assert len(model.seen) > 2
        assert set(model.seen) == {case.inside}
        model(data[0])
        assert model.seen[-1] == case.outside
    said = [str(w.message) for w in caught if issubclass(w.category, shf.SHFWarning)]
    assert len(said) == (case.words is not None)
    assert all(case.words in words for words in said)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.what)
def test_what_is_refused_says_so(case):
    torch.manual_seed(0)
    with pytest.raises(case.error, match=case.says):
        case.attempt()
