"""SHF as a torch.optim.Optimizer: a step is one iteration of Algorithm 1 on a gradient batch."""

from typing import Any

from shf.base import CurvatureOptimizer
from shf.closure import refuse_both
from shf.data.batches import CurvatureBatch
from shf.data.draws import mix
from shf.distributed.collective import Collective, Share
from shf.distributed.contribution import Contribution
from shf.info import StepInfo
from shf.problems.batch import BatchProblem
from shf.problems.noise import NoiseMeasure
from shf.problems.shared import SharedProblem
from shf.runtime.memory import explained_exhaustion
from shf.subject import Piece


class SHF(CurvatureOptimizer):
    """Stochastic Hessian-free optimization (Kiros, ICLR 2013).

    One `step` is one iteration of Algorithm 1: on the batch it is given it computes objective, gradient and
    preconditioner, solves (B + λI) δ = -∇f by a few CG iterations that start from the last solution, with curvature
    products on `curvature_batch` of the rows, chooses among the CG iterates, adapts λ, searches along the line, and moves.

    There is no learning rate: schedulers have nothing to schedule. `.grad` is neither read nor written, so gradient
    clipping and scaling do nothing. `step` enables grad by itself, respects `model.train()` / `model.eval()`, freezes all
    of the model's randomness for its duration, and leaves torch's global generator alone.

    With several processes each gives `step` its own rows, of any number: batch, `curvature_batch` and masks are those of
    one process that holds all rows in rank order, and all processes take the same step (see [docs/scaling.md](scaling.md)).

    Args:
        model: the module. DistributedDataParallel and torch.compile wrappers are looked through.
        loss: `loss(outputs, targets)`, one number: any torch loss on logits, or a callable; where it is not convex in the
            outputs, the positive part of its Hessian stands in (see [docs/using.md](using.md)). Or a mapping of several,
            name → `shf.Term` (or a loss): the objective is their weighted sum, and `step` takes a mapping of a batch for
            each, name → (inputs, targets).
        params: parameters of the model to train, or groups of them; by default all. Frozen ones are left alone.
        weight_decay: w of the penalty ½ w ‖θ‖², on parameters with two or more dimensions; in groups given explicitly
            (dicts), on all of their members, with a value of their own if they have one.
        reduction: "mean" or "sum" over rows; read from the loss object where it has one.
        forward: how the model is called, `forward(model, inputs)`; by default a tuple is `model(*inputs)`, a dict
            `model(**inputs)`.
        select: `select(data, rows)`, the given rows of inputs or targets.
        count: `count(inputs)`, the number of rows.
        seed: of the dropout masks; drawn once from torch's generator if None. With several processes, rank 0's counts.
        process_group: the torch.distributed group of the processes that train together; "auto" for the default group once
            it is initialised, None to stay alone.
        **options: see `shf.Config`; `damping`, `cg_iterations`, `curvature_batch` are those to look at first.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> optimizer = SHF(model, nn.CrossEntropyLoss(), curvature_batch=10)
        >>> info = optimizer.step(torch.randn(50, 4), torch.randint(3, (50,)))
        >>> info.loss_after <= info.loss_before
        True

    Attributes:
        info: what the last step returned, for where a wrapper of the optimizer does not pass it on.
    """

    info: StepInfo | None = None

    def step(self, inputs: Any = None, targets: Any = None, *, closure: Any = None) -> StepInfo:  # type: ignore[override]
        """One iteration of Algorithm 1 on a gradient batch.

        Args:
            inputs: a tensor, a tuple (`model(*inputs)`) or a dict (`model(**inputs)`), rows along axis 0. Where the
                objective is a sum of terms, a mapping of a batch for each: name → (inputs, targets).
            targets: what the loss takes; any structure of tensors, or None.
            closure: in place of both, a function that returns `shf.evaluate(outputs, targets)`, as often as it is asked; or
                `shf.batch(inputs, targets)`. It may stand in the first place, too.

        Returns:
            What happened. If an error is raised, parameters, buffers and state are as they were before; an interrupt that
            comes while they are written waits until they are.
        """
        if closure is not None:
            inputs = refuse_both(inputs, targets, closure)
        ranks, config = self._connection.ranks(), self.config
        with self._context(self._device), ranks.step(), explained_exhaustion(config.microbatch) as demand:
            own, agreement = ranks.agree(lambda: self._prepare(inputs, targets, ranks))
            pieces: list[Piece] = own.data
            demand.rows = max(piece.batch.rows for piece in pieces)
            demand.separable = all(piece.layout.separable for piece in pieces)
            seed = self._adopt(agreement.seed)
            seeds = [seed] if len(pieces) == 1 else [mix(seed, 0, number) for number in range(len(pieces))]
            problem = SharedProblem(
                self._objective.joined(list(map(self._part, pieces, agreement.shares, seeds))),
                self._objective.decay(own.network, self.param_groups),
                ranks,
                agree=config.nonfinite == "skip",
                seed=seed,
            )
            self.info = self._iteration().run(problem, self._objective.whole(pieces), "batch")
        return self.info

    def _part(self, piece: Piece, share: Share, seed: int) -> BatchProblem:
        """The problem of the rows that are here."""
        config = self.config
        return BatchProblem(
            piece.network,
            piece.loss,
            piece.batch,
            piece.layout,
            curvature_rows=config.part(CurvatureBatch).rows(share.total, self.epoch_index),
            seed=seed,
            microbatch=config.microbatch,
            structural_damping=config.structural_damping,
            noise=config.part(NoiseMeasure).due(self._scalars["iteration"]),
            share=share,
            products=config.takes_products,
        )

    def _prepare(self, inputs: Any, targets: Any, ranks: Collective) -> Contribution:
        """What can be found wrong before anything is computed, and this process's part of the batch."""
        self._refuse_averages()
        pieces = self._objective.pieces(inputs, targets, self.param_groups, ranks)
        counts = [piece.batch.rows for piece in pieces]
        return self._objective.contribution(
            pieces[0].network, counts, self.param_groups, self._settings, self.state, pieces
        )
