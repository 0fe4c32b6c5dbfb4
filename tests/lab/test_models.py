"""Networks of the paper: shapes and dropout conventions."""

import copy

import pytest
import torch
from torch import nn

from shf.lab.models import (
    PaperDropout,
    autoencoder,
    classifier,
    weight_layers,
)


class TestNetworks:
    def test_classifier_has_rectifiers_between_and_logits_out(self) -> None:
        model = classifier((6, 5, 4, 3))
        kinds = [type(layer) for layer in model]
        assert kinds == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]

    @pytest.mark.parametrize(("placement", "dropped"), [("last", [2]), ("all", [1, 2])])
    def test_dropout_sits_where_it_is_asked_for(self, placement: str, dropped: list[int]) -> None:
        model = classifier((6, 5, 4, 3), input_dropout=0.2, hidden_dropout=0.5, dropout=placement)
        names = [name for name, layer in model.named_children() if isinstance(layer, PaperDropout)]
        assert names == ["input_dropout", *(f"dropout{k}" for k in dropped)]
        assert model.input_dropout.p == 0.2

    def test_parameter_names_do_not_depend_on_dropout(self) -> None:
        plain, dropped = classifier((6, 5, 3)), classifier((6, 5, 3), input_dropout=0.2, hidden_dropout=0.5)
        assert plain.state_dict().keys() == dropped.state_dict().keys()

    def test_autoencoder_mirrors_its_encoder_around_a_linear_code(self) -> None:
        model = autoencoder((12, 8, 5, 2))
        widths = [layer.out_features for layer in weight_layers(model)]
        assert widths == [8, 5, 2, 5, 8, 12]
        names = [name for name, _ in model.named_children()]
        code = names.index("linear3")
        assert names[code + 1] == "linear4", "the code is linear"
        assert names[-1] == "linear6", "logits out"
        assert sum(isinstance(layer, nn.Sigmoid) for layer in model) == 4

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"sizes": (3,)}, r"sizes=\(3,\)"),
            ({"sizes": (3, 0)}, r"sizes=\(3, 0\)"),
            ({"sizes": (3, 2), "input_dropout": 1.0}, "input_dropout=1.0"),
            ({"sizes": (3, 2), "hidden_dropout": -0.1}, "hidden_dropout=-0.1"),
            ({"sizes": (3, 2), "dropout": "some"}, "dropout='some'"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            classifier(**arguments)


class TestPaperDropout:
    def test_training_keeps_or_zeroes_and_scales_nothing(self) -> None:
        torch.manual_seed(0)
        kept = PaperDropout(0.3)(torch.full((200, 50), 2.0))
        assert set(kept.unique().tolist()) == {0.0, 2.0}
        assert abs((kept > 0).double().mean().item() - 0.7) < 0.02

    def test_evaluation_is_the_mean_network(self) -> None:
        x = torch.randn(4, 3)
        torch.testing.assert_close(PaperDropout(0.3).eval()(x), 0.7 * x)

    def test_torchs_dropout_is_the_same_up_to_the_scale_of_the_weights(self) -> None:
        paper = classifier((6, 5, 3), input_dropout=0.5).eval()
        other = copy.deepcopy(paper)
        other.input_dropout = nn.Dropout(0.5).eval()
        with torch.no_grad():
            other.linear1.weight.mul_(0.5)
        x = torch.randn(4, 6)
        torch.testing.assert_close(paper(x), other(x))
