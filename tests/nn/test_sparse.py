"""The sparse first layer against its dense twin: products, derivatives, dropout, preconditioner."""

import pytest
import torch
from torch import Tensor, nn

from shf.lab.models import classifier, incoming_weights, weight_layers
from shf.nn import SparseDropout, SparseLinear
from shf.nn.sparse import CSR, multiply


def sparse_matrix(rows: int, columns: int, *, seed: int = 0, density: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(rows, columns, generator=generator, dtype=torch.float64) + 0.1
    return values * (torch.rand(rows, columns, generator=generator) < density)


@pytest.fixture
def X() -> Tensor:
    matrix = sparse_matrix(7, 30)
    matrix[3] = 0.0  # a document without words
    return matrix


class TestSparseProduct:
    def test_forward_and_adjoint_equal_dense_products(self, X: Tensor) -> None:
        D, G = torch.randn(30, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
        matrix = CSR.of(X.to_sparse_csr())
        torch.testing.assert_close(multiply(matrix, D), X @ D)
        torch.testing.assert_close(multiply(matrix, G, adjoint=True), X.T @ G)

    def test_first_and_second_derivatives(self, X: Tensor) -> None:
        matrix = CSR.of(X.to_sparse_csr())
        D = torch.randn(30, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda d: multiply(matrix, d).tanh(), D, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda d: multiply(matrix, d).tanh(), D)

    def test_vmap_over_the_dense_factor(self, X: Tensor) -> None:
        matrix = CSR.of(X.to_sparse_csr())
        D = torch.randn(5, 30, 2, dtype=torch.float64)
        torch.testing.assert_close(torch.func.vmap(lambda d: multiply(matrix, d))(D), X @ D)

    def test_transposing_leaves_no_reference_cycle(self, X: Tensor) -> None:
        import gc
        import weakref

        matrix = CSR.of(X.to_sparse_csr())
        D = torch.randn(30, 2, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(multiply(matrix, D).square().sum(), D, create_graph=True)
        gone = weakref.ref(matrix)
        gc.disable()
        try:
            del matrix, gradient
            assert gone() is None
        finally:
            gc.enable()


class TestSparseLinear:
    def twins(self) -> tuple[nn.Module, nn.Module]:
        sparse = classifier((30, 6, 3), sparse_input=True).double()
        dense = classifier((30, 6, 3)).double()
        state = sparse.state_dict()
        dense.load_state_dict({**state, "linear1.weight": state["linear1.weight"].T})
        return sparse, dense

    def test_outputs_and_gradients_equal_the_dense_network(self, X: Tensor) -> None:
        sparse, dense = self.twins()
        targets = torch.arange(7) % 3
        outputs = sparse(X.to_sparse_csr())
        torch.testing.assert_close(outputs, dense(X))
        nn.functional.cross_entropy(outputs, targets).backward()
        nn.functional.cross_entropy(dense(X), targets).backward()
        for ours, theirs in zip(weight_layers(sparse), weight_layers(dense), strict=True):
            gradient = ours.weight.grad
            assert gradient is not None
            torch.testing.assert_close(gradient.T if isinstance(ours, SparseLinear) else gradient, theirs.weight.grad)

    def test_nothing_dense_of_the_size_of_the_batch_is_made(self) -> None:
        """18933 columns and 5000 rows would be 379 MB dense: watched at dispatch level."""
        from torch.utils._python_dispatch import TorchDispatchMode

        rows, columns = 5000, 18933
        starts = torch.arange(rows + 1) * 3
        indices = torch.stack([torch.arange(rows) % 100, torch.arange(rows) % 99 + 100, torch.full((rows,), 18000)], 1)
        X = torch.sparse_csr_tensor(starts, indices.flatten(), torch.ones(3 * rows), size=(rows, columns))
        model = classifier((columns, 3), sparse_input=True, input_dropout=0.2)
        largest = 0

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                if isinstance(out, Tensor) and out.layout == torch.strided:
                    largest = max(largest, out.numel())
                return out

        with Watch():
            loss = model(X).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            torch.autograd.grad(gradients[0].square().sum(), list(model.parameters()), allow_unused=True)
        assert largest <= columns * 3

    def test_per_case_squares_are_the_sum_over_cases(self, X: Tensor) -> None:
        layer = SparseLinear(30, 3).double()
        G = torch.randn(7, 3, dtype=torch.float64)
        weight, bias = torch.zeros_like(layer.weight), torch.zeros_like(layer.bias)
        for j in range(7):
            layer.zero_grad()
            (layer(X[j : j + 1].to_sparse_csr()) * G[j]).sum().backward()
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            weight += layer.weight.grad.square()
            bias += layer.bias.grad.square()
        for inputs in (X, X.to_sparse_csr()):
            squares = layer.per_case_squares(inputs, G)
            torch.testing.assert_close(squares["weight"], weight)
            torch.testing.assert_close(squares["bias"], bias)

    def test_a_wrong_dtype_is_named(self, X: Tensor) -> None:
        with pytest.raises(TypeError, match=r"float64.*float32"):
            SparseLinear(30, 3)(X.to_sparse_csr())

    def test_incoming_weights_have_a_row_per_unit(self) -> None:
        model = classifier((30, 6, 3), sparse_input=True)
        assert [incoming_weights(layer).shape for layer in weight_layers(model)] == [(6, 30), (3, 6)]


class TestSparseDropout:
    def test_only_stored_values_change(self, X: Tensor) -> None:
        drop = SparseDropout(0.5, training_scale=1.0, evaluation_scale=0.5)
        csr = X.to_sparse_csr()
        dropped = drop(csr)
        assert dropped.layout == torch.sparse_csr
        assert torch.equal(dropped.col_indices(), csr.col_indices())
        ratio = dropped.values() / csr.values()
        assert set(ratio.tolist()) == {0.0, 1.0}
        torch.testing.assert_close(drop.eval()(csr).to_dense(), 0.5 * X)

    def test_torch_convention_scales_in_training(self, X: Tensor) -> None:
        drop = SparseDropout(0.75, training_scale=4.0, evaluation_scale=1.0)
        ratio = drop(X.to_sparse_csr()).values() / X.to_sparse_csr().values()
        assert ratio.unique().tolist() == [0.0, pytest.approx(4.0)]
        torch.testing.assert_close(drop.eval()(X.to_sparse_csr()).to_dense(), X)

    def test_rates_are_right_and_cases_and_columns_independent(self) -> None:
        torch.manual_seed(1)
        ones = torch.ones(400, 300).to_sparse_csr()
        mask = SparseDropout(0.2, training_scale=1.0, evaluation_scale=0.8)(ones).to_dense()
        assert abs(mask.mean().item() - 0.8) < 0.005  # sd 0.0012
        for means in (mask.mean(0), mask.mean(1)):
            expected = (0.16 / (mask.numel() / len(means))) ** 0.5
            assert means.std().item() == pytest.approx(expected, rel=0.15), (
                "row and column means vary as coin tosses do"
            )
        centred = mask - mask.mean()
        for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
            assert abs((a * b).mean().item() / 0.16) < 0.01

    def test_a_case_keeps_its_mask_when_rows_are_selected(self, X: Tensor) -> None:
        """What the optimizer does: it replays the draw of the selected rows."""
        from torch.overrides import TorchFunctionMode

        draws: list[Tensor] = []

        class Record(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if func is torch.Tensor.uniform_:
                    draws.append(out.clone())
                return out

        class Replay(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func is torch.Tensor.uniform_:
                    return args[0].copy_(draws[0][2:5])
                return func(*args, **(kwargs or {}))

        drop = SparseDropout(0.5, training_scale=1.0, evaluation_scale=0.5)
        with Record():
            whole = drop(X.to_sparse_csr()).to_dense()
        with Replay():
            part = drop(X[2:5].to_sparse_csr()).to_dense()
        torch.testing.assert_close(part, whole[2:5])
