"""Random draws inside a model, frozen for one step.

Algorithm 1 samples dropout units once per iteration; every evaluation in it must see the same network. All draws that a
model makes through torch pass the dispatcher, whatever module or function asked for them, so that is where they are
caught: the first pass over a batch draws, every later pass is handed the same numbers, a pass over some of the rows
their rows of them.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shf.data.rows import RowAxis, infer_axis
from shf.errors import AmbiguousRowsError

_POSITION = 0x5EED_0000
"""Within a pass the global generator is seeded with this plus the number of draws so far. It is the one place where
code that repeats a part of the pass later (gradient checkpointing) restores the position by itself."""

_WHY = (
    ": what it draws seems to depend on random numbers of some rows; let it depend on numbers that are drawn for all rows "
    "at once, such as torch.rand(()), or use microbatch=None on one process"
)


def mix(*numbers: int | str) -> int:
    """A seed from several numbers (or texts): equal only if all are equal (up to hashing into 63 bits)."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device, *numbers: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(mix(*numbers))


class Draws(TorchDispatchMode):
    """The random numbers of one step over one batch of `rows` rows.

    Args:
        seed: determines every draw together with its position in the pass; the global generator has no part in it.
        rows: rows of the whole batch.
        axes: where the rows lie in the n-th draw, if already known. Needed only if the first pass is itself over some of
            the rows; otherwise the axis is found by comparing shapes.
        minor: how a folded axis (B·k) is laid out where shapes alone do not say.
        own: the rows of the whole batch that this process holds, if others hold the rest (needs `axes`). Passes are then
            over these: they see their rows of what is drawn for the whole batch, whoever holds the others.
    """

    def __init__(
        self,
        seed: int,
        rows: int,
        axes: Sequence[RowAxis | None] | None = None,
        *,
        minor: bool = False,
        own: Tensor | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.axes = axes
        self.drawn: list[Tensor] = []
        self.found: dict[int, RowAxis | None] = {}
        self._seed = seed
        self._minor = minor
        self._own = own
        self._subset: Tensor | None = None

    def over(self, subset: Tensor | None = None) -> AbstractContextManager[None]:
        """A pass over the given rows (None: all) begins; draws made in it come from this step's numbers."""
        torch.default_generator.manual_seed(_POSITION)
        return self._drawing(subset)

    def resumed(self, subset: Tensor | None = None) -> AbstractContextManager[None]:
        """A backward pass: draws occur in it only where gradient checkpointing runs a part of the forward pass again."""
        return self._drawing(subset) if self.drawn else nullcontext()

    @contextmanager
    def _drawing(self, subset: Tensor | None) -> Iterator[None]:
        previous, self._subset = self._subset, subset
        try:
            with self:
                yield
        finally:
            self._subset = previous

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        position = torch.default_generator.initial_seed() - _POSITION
        if not 0 <= position <= len(self.drawn):
            raise RuntimeError(
                f"the model changes torch's global generator while it runs (before {func}): its draws cannot be "
                "frozen for the step; draw without seeding inside forward"
            )
        handler = _HANDLERS.get(func)
        if handler is None and "generator" in func._overloadname:
            raise RuntimeError(
                f"{func} draws from a generator of its own, which cannot be frozen for the step; leave generator= away"
            )
        if handler is None:
            raise RuntimeError(
                f"{func} cannot be frozen for the step: it permutes, or draws from a distribution given by tensors, which "
                "may depend on the network's own values; use dropout, noise from torch.rand or randn (for probabilities p "
                "that do not depend on parameters: torch.rand_like(p) < p), or model.eval()"
            )
        result = handler(self, position, args, kwargs)
        torch.default_generator.manual_seed(_POSITION + position + 1)
        return result

    def sample(self, position: int, like: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """The draw at `position`, for the rows of this pass: drawn for all rows at first, then remembered."""
        if position == len(self.drawn):
            self.drawn.append(self._draw(position, like, fill))
        whole = self.drawn[position]
        found = whole if self._subset is None else self._rows_of(position, whole, like.shape, self._subset)
        if found.shape != like.shape:
            raise AmbiguousRowsError(
                f"random draw number {position} of the model has shape {tuple(like.shape)} in one pass, and the shape "
                f"{tuple(found.shape)} on the same rows in another{_WHY}"
            )
        return found

    def _draw(self, position: int, like: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """Draws for the whole batch and keeps the rows that this process holds."""
        held = self._subset if self._subset is not None else self._own
        axis = None if held is None else self._known_axis(position, like.shape, len(held))
        shape = like.shape if axis is None else axis.resized(like.shape, self.rows)
        whole = fill(like.new_empty(shape), generator(like.device, self._seed, position))
        return whole if axis is None or self._own is None else axis.take(whole, self._own)

    def _known_axis(self, position: int, shape: torch.Size, rows: int) -> RowAxis | None:
        """The axis of a draw that has this shape on so many rows."""
        if self.axes is None or position >= len(self.axes):
            raise AmbiguousRowsError(
                f"random draw number {position} of the model was not there when its rows were looked for{_WHY}"
            )
        axis = self.axes[position]
        if axis is not None and (axis.axis >= len(shape) or shape[axis.axis] != rows * axis.fold):
            raise AmbiguousRowsError(
                f"random draw number {position} of the model has shape {tuple(shape)} on {rows} rows, and was another one "
                f"when its rows were looked for{_WHY}"
            )
        return axis

    def _rows_of(self, position: int, whole: Tensor, shape: torch.Size, subset: Tensor) -> Tensor:
        if self.axes is not None:
            axis = self._known_axis(position, shape, len(subset))
        elif len(subset) == self.rows and tuple(whole.shape) == tuple(shape):
            return whole  # a permutation of all rows is never asked for: this is the whole batch
        else:
            try:
                axis = infer_axis(whole.shape, self.rows, shape, len(subset))
            except AmbiguousRowsError as error:
                raise AmbiguousRowsError(f"random draw number {position} of the model: {error}") from None
            if axis is not None and axis.fold > 1:
                axis = RowAxis(axis.axis, axis.fold, self._minor)
            self.found[position] = axis
        return whole if axis is None else axis.take(whole, subset)


@contextmanager
def preserved_global_state() -> Iterator[None]:
    """Leaves torch's global CPU generator as it was: a step neither reads nor moves it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def watched_draws() -> Iterator[Callable[[], bool]]:
    """Around a pass of a model that was seen to draw nothing, on the CPU: yields whether it drew all the same, by torch's
    global generator. That costs less than a look at each of its operations."""
    state = torch.get_rng_state()
    yield lambda: not torch.equal(state, torch.get_rng_state())


def random_signs(like: Tensor, seed: int) -> Tensor:
    """Independent ±1."""
    signs = torch.empty_like(like, memory_format=torch.contiguous_format)
    return signs.bernoulli_(0.5, generator=generator(like.device, seed)).mul_(2).sub_(1)


def _in_place(func: Any) -> Callable[..., Tensor]:
    """For x.bernoulli_(p), x.normal_() and their kind: the same operation on the whole batch's tensor."""

    def handle(draws: Draws, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        target, *rest = args
        options = {k: v for k, v in kwargs.items() if k != "generator"}

        def fill(whole: Tensor, source: torch.Generator) -> Tensor:
            return func(whole, *rest, **options, generator=source)  # type: ignore[no-any-return]

        target.copy_(draws.sample(position, target, fill))
        return target  # type: ignore[no-any-return]

    return handle


def _factory(
    fill_: Callable[[Tensor, torch.Generator, tuple[Any, ...]], Tensor], size_at: int, dtype: torch.dtype | None = None
) -> Callable[..., Tensor]:
    """For torch.rand(size), torch.randn_like(x) and their kind; `size_at` is where the size (or x) stands in args."""

    def handle(draws: Draws, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        source = args[size_at]
        options = {k: v for k, v in kwargs.items() if k in ("dtype", "device") and v is not None}
        if dtype is not None:
            options.setdefault("dtype", dtype)
        like = (
            torch.empty_like(source, **options) if isinstance(source, Tensor) else torch.empty(tuple(source), **options)
        )
        parameters = args[:size_at] + args[size_at + 1 :]
        return draws.sample(position, like, lambda whole, g: fill_(whole, g, parameters)).clone()

    return handle


def _native_dropout(
    draws: Draws, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    x, p, train = args
    keep = draws.sample(position, x.detach(), lambda whole, g: whole.bernoulli_(1 - p, generator=g)).to(x.dtype)
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * keep * scale, keep.bool()


def _rrelu(draws: Draws, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x, noise, *rest = args
    lower, upper, training = (*rest, *(0.125, 1 / 3, False)[len(rest) :])[:3]
    slope = draws.sample(position, x.detach(), lambda whole, g: whole.uniform_(lower, upper, generator=g))
    if not training:
        slope = torch.full_like(x, (lower + upper) / 2)
    noise.copy_(torch.where(x <= 0, slope, torch.ones_like(slope)))
    return torch.mul(x, noise)


def _uniform(whole: Tensor, g: torch.Generator, _: tuple[Any, ...]) -> Tensor:
    return whole.uniform_(generator=g)


def _normal(whole: Tensor, g: torch.Generator, parameters: tuple[Any, ...]) -> Tensor:
    return whole.normal_(*parameters, generator=g)


def _integers(whole: Tensor, g: torch.Generator, bounds: tuple[Any, ...]) -> Tensor:
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return whole.random_(low, high, generator=g)


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        func: _in_place(func)
        for func in (
            _aten.bernoulli_.float,
            _aten.uniform_.default,
            _aten.normal_.default,
            _aten.exponential_.default,
            _aten.log_normal_.default,
            _aten.cauchy_.default,
            _aten.geometric_.default,
            _aten.random_.default,
            _aten.random_.to,
            getattr(_aten.random_, "from"),
        )
    },
    _aten.rand.default: _factory(_uniform, 0),
    _aten.rand_like.default: _factory(_uniform, 0),
    _aten.randn.default: _factory(_normal, 0),
    _aten.randn_like.default: _factory(_normal, 0),
    _aten.normal.float_float: _factory(_normal, 2),
    _aten.bernoulli.p: _factory(lambda whole, g, p: whole.bernoulli_(*p, generator=g), 0),
    _aten.randint.default: _factory(_integers, 1, torch.int64),
    _aten.randint.low: _factory(_integers, 2, torch.int64),
    _aten.randint_like.default: _factory(_integers, 0),
    _aten.randint_like.low_dtype: _factory(_integers, 0),
    _aten.native_dropout.default: _native_dropout,
    _aten.rrelu_with_noise.default: _rrelu,
}
