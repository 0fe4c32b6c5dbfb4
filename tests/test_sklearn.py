"""The estimators keep scikit-learn's contract, and do what their docstrings say."""

import doctest
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn", reason="needs scikit-learn")

import scipy.sparse  # noqa: E402
from sklearn.datasets import load_iris, make_friedman1, make_multilabel_classification  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from shf.sklearn import SHFClassifier, SHFRegressor, estimators, perceptron  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
FRIEDMAN = make_friedman1(120, noise=0.0, random_state=0)
IRIS = load_iris(return_X_y=True)


@pytest.fixture
def in_batches(monkeypatch):
    """As where exact steps cost too much."""
    monkeypatch.setattr(perceptron, "is_exact", lambda *counts: False)


@pytest.mark.parametrize("kind", [SHFRegressor, SHFClassifier])
def test_scikit_learns_own_checks_pass(kind):
    """With a decay that determines every weight to the seventh digit: some of them compare fits that closely."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(kind((5,), alpha=1e-2, max_iter=40, random_state=0), on_fail=None, on_skip=None)
    assert len(found) > 50
    assert not [(check["check_name"], check["exception"]) for check in found if check["status"] in ("failed", "xfail")]


def test_without_noise_the_fit_is_exact_with_nothing_set():
    X, y = FRIEDMAN
    model = SHFRegressor((20,), alpha=0, random_state=0).fit(X, y)
    assert model.score(X, y) > 1 - 1e-8
    assert model.n_iter_ == len(model.loss_curve_)
    assert model.best_loss_ == min(model.loss_curve_) < 1e-9


def test_the_objective_is_the_one_that_is_documented():
    """f = ½ Σ w ‖y - z‖²/Σw + ½ alpha ‖θ‖²/Σw, in standardised targets."""
    X, y = FRIEDMAN
    weights = np.random.default_rng(0).uniform(0.5, 2, len(y))
    model = SHFRegressor((4,), alpha=0.7, random_state=0, max_iter=30).fit(X, y, weights)
    mean = np.average(y, weights=weights)
    deviation = np.sqrt(np.average((y - mean) ** 2, weights=weights))
    squares = np.average(((y - model.predict(X)) / deviation) ** 2, weights=weights)
    size = sum(np.square(w).sum() for w in (*model.coefs_, *model.intercepts_))
    assert model.loss_ == pytest.approx(0.5 * squares + 0.5 * 0.7 * size / weights.sum(), rel=1e-10)


@pytest.mark.parametrize("exact", [True, False])
def test_classes_are_learned_either_way(exact, monkeypatch):
    monkeypatch.setattr(perceptron, "is_exact", lambda *counts: exact)
    X, y = IRIS
    model = SHFClassifier((10,), alpha=0.1, random_state=0).fit(X, y.astype(str))
    assert model.score(X, y.astype(str)) > 0.96
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    np.testing.assert_allclose(np.log(probabilities), model.predict_log_proba(X), rtol=1e-6, atol=1e-12)
    assert (model.classes_[model.decision_function(X).argmax(1)] == model.predict(X)).all()


def test_regression_in_batches(in_batches):
    X, y = FRIEDMAN
    assert SHFRegressor((20,), random_state=0, max_iter=60).fit(X, y).score(X, y) > 0.9


def test_several_labels_and_several_outputs():
    X, labels = make_multilabel_classification(80, n_features=6, n_classes=3, random_state=0)
    model = SHFClassifier((10,), alpha=0.1, random_state=0).fit(X, labels)
    assert model.predict(X).shape == labels.shape
    assert (model.predict(X) == labels).mean() > 0.9
    X, y = FRIEDMAN
    both = np.stack([y, -3 * y + 5], 1)
    assert SHFRegressor((20,), random_state=0).fit(X, both).score(X, both) > 0.999


@pytest.mark.parametrize("kind", [SHFRegressor, SHFClassifier])
def test_rows_may_be_sparse(kind):
    """Exactly the same where all rows are in a step; where there are batches nothing is made dense."""
    X, y = IRIS[0] * (IRIS[0] > 2), IRIS[1]
    dense, sparse = (kind((5,), random_state=0, max_iter=20).fit(x, y) for x in (X, scipy.sparse.csr_array(X)))
    np.testing.assert_allclose(dense.predict(X), sparse.predict(scipy.sparse.csc_array(X)), rtol=1e-9)


@pytest.mark.parametrize("kind", [SHFRegressor, SHFClassifier])
def test_sparse_rows_stay_sparse_in_batches(kind, in_batches, monkeypatch):
    monkeypatch.setattr(perceptron, "_dense", lambda x: pytest.fail("made dense"))
    X, y = IRIS[0] * (IRIS[0] > 2), IRIS[1]
    assert kind((10,), random_state=0, max_iter=40).fit(scipy.sparse.csr_array(X), y).score(
        scipy.sparse.csr_array(X), y
    ) > (0.85 if kind is SHFRegressor else 0.9)


def test_early_stopping_keeps_the_weights_with_the_best_score():
    X, y = make_friedman1(150, noise=3.0, random_state=0)
    model = SHFRegressor((50,), early_stopping=True, validation_fraction=0.3, random_state=0).fit(X, y)
    assert model.best_validation_score_ == max(model.validation_scores_) > model.validation_scores_[-1]
    assert model.n_iter_ == int(np.argmax(model.validation_scores_)) + 1 + model.n_iter_no_change
    assert SHFRegressor((50,), random_state=0).fit(X, y).validation_scores_ is None


def test_a_copy_goes_on_where_the_fit_was():
    X, y = FRIEDMAN
    model = SHFRegressor((5,), random_state=0, max_iter=10)
    model.partial_fit(X, y)
    again = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert (again.predict(X) == model.predict(X)).all()
    before = again.score(X, y)
    for _ in range(20):
        again.partial_fit(X, y)
    assert again.score(X, y) > max(before, 0.7)
    assert again.n_iter_ == 21


def test_warm_starts_go_on():
    X, y = FRIEDMAN
    model = SHFRegressor((10,), random_state=0, max_iter=5, warm_start=True).fit(X, y)
    end = model.loss_
    assert model.fit(X, y).loss_curve_[0] <= end
    with pytest.raises(ValueError, match="warm_start=True: layers of"):
        model.set_params(hidden_layer_sizes=(7,)).fit(X, y)


def test_classes_must_be_known_from_the_first_call():
    X, y = IRIS
    with pytest.raises(ValueError, match="the first call needs classes"):
        SHFClassifier().partial_fit(X, y)
    model = SHFClassifier((5,), random_state=0).partial_fit(X[:60], y[:60], classes=[0, 1, 2])
    assert model.predict_proba(X).shape == (150, 3)
    with pytest.raises(ValueError, match="are not those of the first call"):
        model.partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match="labels that are not among the classes"):
        model.partial_fit(X, y + 1)


def test_it_says_when_it_ended_too_early():
    with pytest.warns(ConvergenceWarning, match=r"SHFRegressor\(max_iter=2\)"):
        SHFRegressor((5,), max_iter=2, random_state=0).fit(*FRIEDMAN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_layer_sizes", (0,)),
        ("activation", "swish"),
        ("max_iter", 0),
        ("alpha", -1.0),
        ("tol", float("nan")),
        ("validation_fraction", 1.0),
        ("n_iter_no_change", 1.5),
    ],
)
def test_parameters_are_checked_by_fit(name, value):
    with pytest.raises(ValueError, match=rf"SHFRegressor\({name}=.*\): must be"):
        SHFRegressor(**{name: value}).fit(*FRIEDMAN)


def test_verbose_prints_every_iteration(capsys):
    model = SHFRegressor((5,), max_iter=3, verbose=True, random_state=0).fit(*FRIEDMAN)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1] == f"Iteration 3, loss = {model.loss_:.8g}"


def test_the_examples_in_docstrings_run():
    result = doctest.testmod(estimators, extraglobs={"np": np})
    assert result.attempted
    assert not result.failed


def test_the_page_runs(capsys):
    page = (Path(__file__).parents[1] / "docs" / "tables.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    assert names["smooth"].score(names["X_test"], names["y_test"]) > 0.99
    assert names["noisy"].best_score_ > 0.4


def test_where_scikit_learn_is_missing_the_import_says_so():
    program = "import sys; sys.modules['sklearn'] = None\nimport shf\nimport shf.sklearn"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert "torch-shf[sklearn]" in done.stderr
