"""`SHFRegressor` and `SHFClassifier`."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from shf.sklearn.perceptron import Array, Perceptron, moments
from shf.sklearn.training import HalfSquares, Logistic, Softmax, Weighted

_NATS = 1e-4
"""Where classes can be told apart f falls for ever: by less than this it does not count."""
_CERTAIN = np.finfo(np.float64).eps
"""A label's probability stays below 1 by this."""


class SHFRegressor(RegressorMixin, Perceptron):  # type: ignore[misc]
    """A perceptron for regression on a table, trained by exact Gauss-Newton steps.

    f = ½ Σ_i w_i ‖y_i - z(x_i)‖² / Σ_i w_i + ½ alpha ‖θ‖² / Σ_i w_i. Where rows × outputs or parameters are few (2500), an
    iteration is one step of `shf.presets.residual` on all rows; otherwise an epoch of `shf.presets.fast`. Inputs and targets
    are standardised inside, in double precision; sparse inputs that stay sparse are only divided by their largest entries.

    Args:
        hidden_layer_sizes: units of the hidden layers.
        activation: "tanh", "relu", "logistic" or "identity".
        alpha: strength of the weight decay, divided by the rows as in `MLPRegressor`; of all parameters, intercepts too. On
            the scale of standardised targets.
        max_iter: the most iterations.
        random_state: of the first weights, of the rows that are held out, and of batches.
        tol: an iteration improves if f falls by more than this share of itself; with early stopping, if the score rises.
        verbose: whether to print a line for every iteration.
        warm_start: whether `fit` goes on from the last fit, with its scale of inputs and targets.
        early_stopping: whether rows are held out, and the weights with the best score on them kept.
        validation_fraction: of the rows, that are held out.
        n_iter_no_change: training ends after so many iterations in a row that do not improve.

    Attributes:
        coefs_, intercepts_: of the layers, between standardised inputs and targets.
        loss_curve_, loss_, best_loss_: f after each iteration, after the last, and the least.
        n_iter_: iterations made.
        validation_scores_, best_validation_score_: R² on the rows that are held out; None without.

    Example:
        >>> X = np.random.rand(200, 2)
        >>> SHFRegressor((20,), random_state=0).fit(X, np.sin(6 * X[:, 0])).score(X, np.sin(6 * X[:, 0])) > 0.99
        True
    """

    _loss = HalfSquares()

    def partial_fit(self, X: Array, y: Array, sample_weight: Array = None) -> Self:
        """One step on these rows, of `shf.presets.fast`; give a thousand rows or so. The first call decides how inputs and
        targets are scaled."""
        return self._partial_fit(X, y, sample_weight)

    def _encode(self, y: Array, *, fresh: bool, classes: Array | None = None) -> Array:
        encoded = np.asarray(y, dtype=np.float64)
        self._flat = encoded.ndim == 1
        encoded = encoded.reshape(len(encoded), -1)
        if not fresh and encoded.shape[1] != self.n_outputs_:
            raise ValueError(
                f"y has {encoded.shape[1]} columns, and was fitted with {self.n_outputs_}: expected the same"
            )
        return encoded

    def _scale_targets(self, encoded: Array, weights: Array) -> None:
        self._target_shift, self._target_scale = moments(encoded, weights)

    def _as_targets(self, encoded: Array) -> Tensor:
        return super()._as_targets((encoded - self._target_shift) / self._target_scale)

    def _judge(self, X: Array, y: Array, weights: Array) -> float:
        return float(r2_score(y, self._predicted(self._values(X)), sample_weight=weights))

    def predict(self, X: Array) -> Array:
        """Targets, in the shape that they were given in."""
        return self._predicted(self._outputs(X))

    def _predicted(self, z: Array) -> Array:
        found = z * self._target_scale + self._target_shift
        return found[:, 0] if self._flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class SHFClassifier(ClassifierMixin, Perceptron):  # type: ignore[misc]
    """A perceptron for classification on a table, trained by exact Gauss-Newton steps on the cross-entropy.

    Two classes, or several labels a row, have logistic outputs, more classes a softmax. Everything else is as in
    `SHFRegressor`; what differs:

    Args:
        tol: an iteration improves if f falls by more than this share of itself, and by more than 1e-4; with early stopping,
            if the accuracy rises.

    Attributes:
        classes_: the labels, in the order of `predict_proba`'s columns.
    """

    _stratified = True

    @property
    def _loss(self) -> Weighted:  # type: ignore[override]
        return Logistic() if self._logistic else Softmax()

    @property
    def _logistic(self) -> bool:
        return bool(self._labels.y_type_ != "multiclass")

    def partial_fit(self, X: Array, y: Array, classes: Array = None, sample_weight: Array = None) -> Self:
        """One step on these rows, of `shf.presets.fast`; give a thousand rows or so.

        Args:
            X: (rows, features); the first call decides how they are scaled.
            y: labels.
            classes: all labels that there are, in the first call.
            sample_weight: of the rows.
        """
        if classes is None and not hasattr(self, "classes_"):
            raise ValueError("SHFClassifier.partial_fit: the first call needs classes, all labels that there are")
        if classes is not None and hasattr(self, "classes_") and list(np.unique(classes)) != list(self.classes_):
            raise ValueError(f"classes={classes!r} are not those of the first call, {list(self.classes_)}")
        return self._partial_fit(X, y, sample_weight, classes)

    def _encode(self, y: Array, *, fresh: bool, classes: Array | None = None) -> Array:
        check_classification_targets(y)
        if fresh:
            self._labels = LabelBinarizer().fit(y if classes is None else classes)
            self.classes_ = self._labels.classes_
        elif np.ndim(y) == 1 and not np.isin(y, self.classes_).all():
            raise ValueError(f"y has labels that are not among the classes of the first fit, {list(self.classes_)}")
        return np.asarray(self._labels.transform(y), dtype=np.float64)

    def _as_targets(self, encoded: Array) -> Tensor:
        return super()._as_targets(encoded) if self._logistic else torch.from_numpy(encoded.argmax(1))

    def _improvement(self, best: float) -> float:
        return max(super()._improvement(best), _NATS)

    def _judge(self, X: Array, y: Array, weights: Array) -> float:
        return float(accuracy_score(y, self._decided(self._values(X)), sample_weight=weights))

    def predict(self, X: Array) -> Array:
        """Labels."""
        return self._decided(self._outputs(X))

    def _decided(self, z: Array) -> Array:
        if self._labels.y_type_.startswith("multilabel"):
            return (z > 0).astype(int)
        numbers = (z[:, 0] > 0).astype(int) if self._logistic else z.argmax(1)
        return self.classes_[numbers]

    def decision_function(self, X: Array) -> Array:
        """Log-odds of the second class or of each label, or logits of the classes."""
        z = self._outputs(X)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict_proba(self, X: Array) -> Array:
        """Of each class, or of each label."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Array) -> Array:
        """Logarithms of the probabilities."""
        z = self._outputs(X)
        if not self._logistic:
            return z - np.logaddexp.reduce(z, axis=1, keepdims=True)
        if self._labels.y_type_.startswith("multilabel"):
            return np.minimum(-np.logaddexp(0.0, -z), -_CERTAIN)
        found = -np.logaddexp(0.0, np.hstack([z, -z]))
        return found[:, : len(self.classes_)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags
