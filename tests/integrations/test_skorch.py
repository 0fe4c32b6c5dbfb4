"""The same training in a plain loop and in skorch."""

import pickle

import pytest
import torch

import plain_loop
import shf
from helpers import theta

X, Y = plain_loop.spirals().tensors


def net(kind=None, module=None, **settings):
    import skorch

    from shf.integrations.skorch import SHFMixin

    global Net  # a class that pickle finds

    class Net(SHFMixin, kind or skorch.NeuralNetClassifier):
        pass

    options = {f"optimizer__{name}": value for name, value in plain_loop.OPTIONS.items()}
    settings = {"max_epochs": 2, "batch_size": 500, "train_split": None, "verbose": 0, **options, **settings}
    return Net(module or plain_loop.network(), **{"criterion": torch.nn.CrossEntropyLoss, **settings})


def test_the_same_steps_and_their_numbers_in_the_history():
    model = net().fit(X.numpy(), Y.numpy())
    assert torch.equal(theta(model.module_), theta(plain_loop.main(2)))
    assert model.optimizer_.epoch_index == 2
    row = model.history[-1, "batches", -1]
    assert row["train_loss"] == pytest.approx(model.optimizer_.info.loss_before)
    assert row["damping"] == model.optimizer_.info.damping


def test_predictions_are_the_averages_and_training_goes_on_from_the_iterates():
    model = net(optimizer__averaging=0.9).fit(X.numpy(), Y.numpy())
    iterates = theta(model.module_)
    predicted = model.predict(X.numpy())
    assert not torch.equal(theta(model.module_), iterates)
    assert (predicted != Y.numpy()).mean() < 0.6
    model.partial_fit(X.numpy(), Y.numpy())
    assert model.optimizer_.info.accepted


def test_it_is_pickled_cloned_and_searched():
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV

    model = net().fit(X.numpy(), Y.numpy())
    other = pickle.loads(pickle.dumps(model))  # noqa: S301 - its own
    for each in (model, other):
        each.partial_fit(X.numpy(), Y.numpy())
    assert torch.equal(theta(other.module_), theta(model.module_))
    for each in (model, other):
        each.set_params(optimizer__cg_iterations=2).fit(X.numpy(), Y.numpy())
        assert each.optimizer_.info.cg_steps == 2
    search = GridSearchCV(clone(model), {"optimizer__cg_iterations": [1, 10]}, cv=2, scoring="accuracy")
    search.fit(X.numpy(), Y.numpy())
    assert search.best_score_ > 0.4


def test_a_criterion_of_probabilities():
    """Of the negative log-likelihood skorch takes the logarithm first; as cross-entropy on logits, up to rounding."""
    module = torch.nn.Sequential(plain_loop.network(), torch.nn.Softmax(dim=1))
    ours = net(module=module, criterion=torch.nn.NLLLoss).fit(X.numpy(), Y.numpy())
    first = ours.history[0, "batches", 0]
    assert first["train_loss"] == pytest.approx(
        plain_loop.LOSS(plain_loop.network()(X[:500]), Y[:500]).item(), rel=1e-4
    )
    assert ours.history[-1, "train_loss"] < ours.history[0, "train_loss"]


def test_regression():
    import skorch

    model = net(skorch.NeuralNetRegressor, criterion=torch.nn.MSELoss)
    model.fit(X.numpy(), torch.nn.functional.one_hot(Y).float().numpy())
    assert model.history[-1, "train_loss"] < model.history[0, "train_loss"]


def test_without_the_mixin_the_answer_has_the_page():
    import skorch

    plain = skorch.NeuralNetClassifier(plain_loop.network(), optimizer=shf.SHF, verbose=0)
    with pytest.raises(TypeError, match=r"docs/integrations\.md#skorch"):
        plain.fit(X.numpy(), Y.numpy())
