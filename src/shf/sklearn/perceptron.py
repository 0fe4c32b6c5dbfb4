"""What both estimators have in common: scikit-learn's conventions around `shf.sklearn.training`."""

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from shf import presets
from shf.sklearn.training import (
    ACTIVATIONS,
    BatchTraining,
    Table,
    Training,
    Weighted,
    build,
    is_exact,
    network_of,
)

Array = Any
"""A numpy array, or a sparse matrix of scipy."""
_VALUES: dict[str, Callable[[Array], Array]] = {
    "identity": lambda z: z,
    "logistic": lambda z: 0.5 * (1.0 + np.tanh(0.5 * z)),
    "tanh": np.tanh,
    "relu": lambda z: np.maximum(z, 0.0),
}


class Perceptron(BaseEstimator):  # type: ignore[misc]
    """What regression and classification have in common."""

    coefs_: list[Array]
    intercepts_: list[Array]
    loss_curve_: list[float]
    validation_scores_: list[float] | None
    best_validation_score_: float | None
    _training: Training | None

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "tanh",
        *,
        alpha: float = 1e-4,
        max_iter: int = 200,
        random_state: Any = None,
        tol: float = 1e-2,
        verbose: bool = False,
        warm_start: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.alpha = alpha
        self.max_iter = max_iter
        self.random_state = random_state
        self.tol = tol
        self.verbose = verbose
        self.warm_start = warm_start
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change

    # --- what a regressor and a classifier say -----------------------------------------------------------------------

    _loss: Weighted
    _stratified = False

    def _encode(self, y: Array, *, fresh: bool, classes: Array | None = None) -> Array:
        """Targets of the network, (rows, outputs)."""
        raise NotImplementedError

    def _scale_targets(self, encoded: Array, weights: Array) -> None:
        """Chooses the scale of the targets, where they have one."""

    def _as_targets(self, encoded: Array) -> Tensor:
        """As the loss takes them."""
        return torch.from_numpy(np.ascontiguousarray(encoded, dtype=np.float64))

    def _judge(self, X: Array, y: Array, weights: Array) -> float:
        """The score on rows that are held out."""
        raise NotImplementedError

    def _improvement(self, best: float) -> float:
        """By how much f must fall below the best to count."""
        return self.tol * best

    # --- training ----------------------------------------------------------------------------------------------------

    def fit(self, X: Array, y: Array, sample_weight: Array = None) -> Self:
        """Trains on a table.

        Args:
            X: (rows, features), dense or sparse.
            y: targets, (rows,) or (rows, outputs).
            sample_weight: of the rows; a row of weight 2 counts as two rows.
        """
        self._check_parameters()
        again = self.warm_start and hasattr(self, "coefs_")
        X, y, weights = self._validated(X, y, sample_weight, reset=True)
        encoded = self._encode(y, fresh=not again)
        random = check_random_state(self.random_state)
        held_out = None
        if self.early_stopping:
            kept, out = train_test_split(
                np.arange(len(y)),
                test_size=self.validation_fraction,
                random_state=random,
                stratify=y if self._stratified and np.ndim(y) == 1 else None,
            )
            held_out = X[out], y[out], weights[out]
            X, encoded, weights = X[kept], encoded[kept], weights[kept]
        X, encoded, weights = _with_weight(X, encoded, weights)
        sizes = self._sizes(X.shape[1], encoded.shape[1])
        if again and sizes != [len(self.coefs_[0]), *map(len, self.intercepts_)]:
            known = [len(self.coefs_[0]), *map(len, self.intercepts_)]
            raise ValueError(f"warm_start=True: layers of {sizes} units do not go on from {known}; expected the same")
        parameters = sum((i + 1) * o for i, o in pairwise(sizes))
        exact = is_exact(X.shape[0], sizes[-1], parameters)
        if not again:
            self._scale(X, encoded, weights, centre=exact or not _is_sparse(X))
            self._initialise(sizes, random)
        table = self._table(X, encoded, weights, dense=exact)
        decay = self.alpha / weights.sum()
        kind, settings = (Training, presets.residual) if exact else (BatchTraining, presets.fast)
        network = self._network(table.inputs)
        self._run(kind(network, self._loss, decay, int(random.randint(2**31)), settings), table, held_out)
        self._training = None
        return self

    def _partial_fit(self, X: Array, y: Array, sample_weight: Array, classes: Array | None = None) -> Self:
        self._check_parameters()
        first = not hasattr(self, "coefs_")
        X, y, weights = self._validated(X, y, sample_weight, reset=first)
        encoded = self._encode(y, fresh=first, classes=classes)
        X, encoded, weights = _with_weight(X, encoded, weights)
        random = check_random_state(self.random_state)
        if first:
            self._scale(X, encoded, weights, centre=not _is_sparse(X))
            self._initialise(self._sizes(X.shape[1], encoded.shape[1]), random)
        table = self._table(X, encoded, weights, dense=not _is_sparse(X))
        training = getattr(self, "_training", None)
        if training is None:
            network, seed = self._network(table.inputs), int(random.randint(2**31))
            training = Training(network, self._loss, self.alpha / weights.sum(), seed, presets.fast)
        self._count(training.step(table).loss_before)
        self._take(training.weights())
        self._training = training
        return self

    def _run(self, training: Training, table: Table, held_out: tuple[Array, Array, Array] | None) -> None:
        """Iterations until nothing improves; with rows held out, the best weights by their score."""
        self.loss_curve_, self.n_iter_, self.best_loss_ = [], 0, np.inf
        scores: list[float] = []
        best_weights, best_score, idle = None, -np.inf, 0
        while self.n_iter_ < self.max_iter and idle < self.n_iter_no_change:
            last = self.best_loss_
            self._count(training.iterate(table))
            words = f"Iteration {self.n_iter_}, loss = {self.loss_:.8g}"
            if held_out is None:
                better = last == np.inf or last - self.loss_ > self._improvement(last)
            else:
                self._take(training.weights())
                score = self._judge(*held_out)
                scores.append(score)
                better = score > best_score
                if better:
                    best_score, best_weights = score, (self.coefs_, self.intercepts_)
                words += f", validation score = {score:.6f}"
            idle = 0 if better else idle + 1
            if self.verbose:
                print(words)
        self._take(training.weights())
        if best_weights is not None:
            self.coefs_, self.intercepts_ = best_weights
        self.validation_scores_, self.best_validation_score_ = (scores, best_score) if scores else (None, None)
        if idle < self.n_iter_no_change:
            warnings.warn(
                f"{type(self).__name__}(max_iter={self.max_iter}): the last iterations still improved; give more of them, "
                "or a larger tol",
                ConvergenceWarning,
                stacklevel=3,
            )

    def _count(self, loss: float) -> None:
        self.loss_ = loss
        self.loss_curve_ = [*getattr(self, "loss_curve_", []), loss]
        self.best_loss_ = min(getattr(self, "best_loss_", np.inf), loss)
        self.n_iter_ = getattr(self, "n_iter_", 0) + 1

    def _take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.coefs_, self.intercepts_ = [w.numpy() for w, _ in pairs], [b.numpy() for _, b in pairs]

    # --- tables ------------------------------------------------------------------------------------------------------

    def _validated(self, X: Array, y: Array, sample_weight: Array, *, reset: bool) -> tuple[Array, Array, Array]:
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            multi_output=True,
            y_numeric=not self._stratified,
            dtype=np.float64,
            reset=reset,
        )
        y = column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        check_consistent_length(X, y, weights)
        return X, y, weights

    def _scale(self, X: Array, encoded: Array, weights: Array, *, centre: bool) -> None:
        """Inputs to mean 0 and variance 1; sparse ones that stay sparse to a largest entry of 1."""
        if centre:
            self._input_shift, self._input_scale = moments(_dense(X), weights)
        else:
            scale = abs(X).max(axis=0).toarray().ravel()
            self._input_shift, self._input_scale = np.zeros(X.shape[1]), np.where(scale > 0, scale, 1.0)
        self._scale_targets(encoded, weights)

    def _table(self, X: Array, encoded: Array, weights: Array, *, dense: bool) -> Table:
        if _is_sparse(X) and not dense and not self._input_shift.any():
            X = X.multiply(1 / self._input_scale).tocsr()
            inputs = torch.sparse_csr_tensor(
                torch.from_numpy(X.indptr.astype(np.int64)),
                torch.from_numpy(X.indices.astype(np.int64)),
                torch.from_numpy(X.data),
                size=X.shape,
                check_invariants=False,
            )
        else:
            inputs = torch.from_numpy((_dense(X) - self._input_shift) / self._input_scale)
        return Table(inputs, self._as_targets(encoded), torch.from_numpy(weights / weights.mean()))

    def _sizes(self, features: int, outputs: int) -> list[int]:
        hidden = self.hidden_layer_sizes
        return [features, *(hidden if hasattr(hidden, "__iter__") else [hidden]), outputs]

    def _initialise(self, sizes: list[int], random: np.random.RandomState) -> None:
        source = torch.Generator().manual_seed(int(random.randint(2**31)))
        self._take(build(sizes, self.activation, source))
        self.n_layers_, self.n_outputs_ = len(sizes), sizes[-1]
        for name in ("loss_curve_", "best_loss_", "n_iter_", "_training"):
            self.__dict__.pop(name, None)

    def _network(self, inputs: Tensor) -> torch.nn.Sequential:
        """With the present weights."""
        pairs = [(torch.from_numpy(w), torch.from_numpy(b)) for w, b in zip(self.coefs_, self.intercepts_, strict=True)]
        return network_of(pairs, self.activation, sparse=inputs.layout is torch.sparse_csr)

    def _check_parameters(self) -> None:
        def refuse(name: str, expected: str) -> None:
            raise ValueError(f"{type(self).__name__}({name}={getattr(self, name)!r}): must be {expected}")

        hidden = self.hidden_layer_sizes
        hidden = list(hidden) if hasattr(hidden, "__iter__") else [hidden]
        if any(not isinstance(n, Integral) or n < 1 for n in hidden):
            refuse("hidden_layer_sizes", "whole numbers of at least 1")
        if self.activation not in ACTIVATIONS:
            refuse("activation", f"one of {', '.join(map(repr, ACTIVATIONS))}")
        for name in ("max_iter", "n_iter_no_change"):
            if not isinstance(getattr(self, name), Integral) or getattr(self, name) < 1:
                refuse(name, "a whole number of at least 1")
        for name in ("alpha", "tol"):
            if not isinstance(getattr(self, name), Real) or not 0 <= getattr(self, name) < np.inf:
                refuse(name, "a number of at least 0")
        if not isinstance(self.validation_fraction, Real) or not 0 < self.validation_fraction < 1:
            refuse("validation_fraction", "a number between 0 and 1")

    # --- use ---------------------------------------------------------------------------------------------------------

    def _outputs(self, X: Array) -> Array:
        """Of the network, for raw rows: the scale of the inputs is taken into the first layer."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return self._values(X)

    def _values(self, X: Array) -> Array:
        weight = self.coefs_[0] / self._input_scale[:, None]
        z = X @ weight + (self.intercepts_[0] - self._input_shift @ weight)
        for weight, bias in zip(self.coefs_[1:], self.intercepts_[1:], strict=True):
            z = _VALUES[self.activation](z) @ weight + bias
        return z

    def __getstate__(self) -> dict[str, Any]:
        """Without the optimizer that `partial_fit` keeps: it begins anew in a copy."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_training": None} if "_training" in state else state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def moments(x: Array, weights: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of the columns; 1 in place of a deviation of 0."""
    mean = np.average(x, axis=0, weights=weights)
    deviation = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weights))
    small = deviation <= 10 * np.finfo(np.float64).eps * np.maximum(np.abs(mean), np.finfo(np.float64).tiny)
    return mean, np.where(small, 1.0, deviation)


def _with_weight(X: Array, encoded: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Without the rows of weight 0."""
    kept = weights > 0
    if not kept.any():
        raise ValueError("sample_weight: no row to train on has a weight above 0; expected some")
    return (X, encoded, weights) if kept.all() else (X[kept], encoded[kept], weights[kept])


def _is_sparse(X: Array) -> bool:
    return hasattr(X, "toarray")


def _dense(X: Array) -> Array:
    return X.toarray() if _is_sparse(X) else X
