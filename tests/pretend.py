"""A pretend accelerator: a device that torch takes for a real one, where there is none. `register()` makes it.

Its tensors are torch's own, of the dispatch key that torch keeps for devices from elsewhere. Whatever operation reaches that
key runs on the CPU, over the same memory, and its results are tensors of the device again. So autograd (which runs their
backward passes in a thread of its own, as on CUDA), views, in-place operations, dispatch modes and functorch are
torch's. As on CUDA

- tensors of the device and of the CPU do not mix, but for a scalar tensor among elementwise operations, indices, and
  lengths of packed sequences, which torch wants on the CPU;
- a generator of the CPU does not fill a tensor of the device, and the device has a global generator of its own;
- the host waits for the device wherever it reads of it: `.item()`, `bool()`, `.cpu()`, and what must know entries to know a
  shape (`nonzero`, masks as indices); and for the copy of what it sends. `waits()` lists these, with the lines that asked.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pretend_kernels import INSTEAD
from shf.data.tree import leaves, map_leaves

NAME = "pretend"
_aten = torch.ops.aten


@dataclass(frozen=True)
class Wait:
    """One time that the host waited for the device: for which operation, and the line of shf that asked for it (an empty
    string in a backward pass, which has a thread of its own)."""

    operation: str
    line: str


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """What is waited for inside of the block."""
    global _seen
    previous, _seen = _seen, []
    try:
        yield _seen
    finally:
        _seen = previous


_seen: list[Wait] | None = None


def _wait(operation: str) -> None:
    if _seen is None:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and "/src/shf/" not in frame.f_code.co_filename:
        frame = frame.f_back
    path = frame.f_code.co_filename
    inside = "/src/shf/" in path
    _seen.append(Wait(operation, f"{path.rpartition('/src/shf/')[2]}:{frame.f_lineno}" if inside else ""))


# --- memory -------------------------------------------------------------------------------------------------------------


def _is_own(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


def _storage(host: torch.UntypedStorage) -> torch.UntypedStorage:
    """The CPU's memory as the device's, which keeps it alive."""
    device = torch.device(NAME, 0)
    found = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes())
    found.host = host
    return found


def _place_(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """`tensor` in this memory, laid out as another is; the kernel is the CPU's, which looks at no device."""
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    layout = like.storage_offset(), like.shape, like.stride()
    return _aten.set_.source_Storage_storage_offset.redispatch(cpu, tensor, storage, *layout)


def _host(tensor: Tensor) -> Tensor:
    """A tensor of the CPU over the same memory."""
    host = getattr(tensor.untyped_storage(), "host", None) or torch.UntypedStorage(0)
    return torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Call:
    """One operation: what of its arguments is the device's, on the CPU, and back."""

    def __init__(self) -> None:
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        self.memory: dict[int, torch.UntypedStorage] = {}

    def lowered(self, value: Tensor) -> Tensor:
        if not _is_own(value):
            return value
        host = _host(value)
        self.own[id(host)] = value, host
        self.memory[host.untyped_storage()._cdata] = value.untyped_storage()
        return host

    def raised(self, value: Tensor) -> Tensor:
        """A result: the argument itself where an operation in place returns it, a view of it where it shares its memory."""
        if id(value) in self.own:
            return self.own[id(value)][0]
        host = value.untyped_storage()
        storage = self.memory.get(host._cdata) or _storage(host)
        return _place_(torch._C._acc.create_empty_tensor((0,), value.dtype), storage, value)

    def resized_(self) -> None:
        """Arguments that the operation has given another shape or other memory (`out=`, `resize_`)."""
        for own, host in self.own.values():
            storage = self.memory[host.untyped_storage()._cdata]  # of the same memory
            if storage.nbytes() != host.untyped_storage().nbytes():
                storage = _storage(host.untyped_storage())
            elif own.shape == host.shape and own.stride() == host.stride():
                continue
            _place_(own, storage, host)


# --- operations ---------------------------------------------------------------------------------------------------------

_FROM_CPU = {  # what may be the CPU's beside tensors of the device: the positions of such arguments
    _aten.index.Tensor: {1},
    _aten.index.Tensor_out: {1},
    _aten.index_put_.default: {1},
    _aten._index_put_impl_.default: {1},
    _aten._pack_padded_sequence.default: {1},
    _aten._pack_padded_sequence_backward.default: {2},
    _aten._pad_packed_sequence.default: {1},
}
_SCALARS = {_aten.fill_.Tensor, _aten.masked_fill_.Tensor, _aten.masked_fill.Tensor, _aten.index_put_.default}
_WAITED_BEFORE = {_aten.index.Tensor_out}
"""It has sent its indices, or looked for the entries of its masks, by other operations."""
_COPIES = {_aten._copy_from.default, _aten._copy_from_and_resize.default}


def _refuse_mixing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As torch does where a kernel of CUDA is given a tensor of the CPU."""
    tensors = [*leaves(args), *leaves(kwargs)]
    if all(map(_is_own, tensors)):
        return
    allowed = _FROM_CPU.get(op, set())
    among = [*leaves([value for place, value in enumerate(args) if place not in allowed]), *leaves(kwargs)]
    scalars = torch.Tag.pointwise in op.tags or op in _SCALARS
    others = [t for t in among if not (_is_own(t) or (scalars and t.ndim == 0))]
    if others and any(map(_is_own, tensors)):
        shapes = " and ".join(str(tuple(t.shape)) for t in others)
        raise RuntimeError(f"{op}: tensors of the CPU (of shape {shapes}) among those of the device {NAME!r}")


def _note_waiting(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if op in _COPIES:
        if not (_is_own(args[0]) and _is_own(args[1])):
            _wait("read" if _is_own(args[0]) else "send")
    elif op in (_aten._local_scalar_dense.default, _aten.equal.default):
        _wait("read")
    elif op is _aten._index_put_impl_.default:
        if any(i.dtype is torch.bool or not _is_own(i) for i in leaves(args[1])):
            _wait(str(op))
    elif torch.Tag.dynamic_output_shape in op.tags and op not in _WAITED_BEFORE:
        _wait(str(op))


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on the CPU; what torch calls for every operation that reaches the device's key."""
    _note_waiting(op, args, kwargs)
    if op in _COPIES:
        source, target = (_host(t) if _is_own(t) else t for t in args[:2])
        target.resize_(source.shape).copy_(source) if "resize" in str(op) else target.copy_(source)
        return args[1]
    if op.overloadpacket is _aten.set_:
        return _set_(*args)
    _refuse_mixing(op, args, kwargs)
    call = _Call()
    lowered, named = map_leaves(call.lowered, args), map_leaves(call.lowered, kwargs)
    if getattr(named.get("device"), "type", None) == NAME:
        named["device"] = torch.device("cpu")
    with _draws(op, named):
        found = INSTEAD.get(op, op)(*lowered, **named)
    call.resized_()
    return map_leaves(call.raised, found)


def _set_(tensor: Tensor, source: Any = None, offset: int = 0, size: Any = None, stride: Any = None) -> Tensor:
    """`set_`, of a storage of the device or a tensor of it."""
    if source is None:
        return _place_(tensor, _storage(torch.UntypedStorage(0)), torch.empty(0, dtype=tensor.dtype))
    if isinstance(source, Tensor):
        return _place_(tensor, source.untyped_storage(), source)
    host = torch.empty(0, dtype=tensor.dtype)
    host.set_(source.host, offset, size, stride) if size is not None else host.set_(source.host)
    return _place_(tensor, source, host)


# --- random numbers -----------------------------------------------------------------------------------------------------


class Generator(torch._C.Generator):
    """What `torch.Generator` is while the device pretends: one that knows that it belongs to it."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        own = torch.device(device).type == NAME
        found = super().__new__(cls, "cpu" if own else device)
        if own:
            _generators[found._cdata] = found
        return found

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0) if _generators.get(self._cdata) is self else super().device


_generators: WeakValueDictionary[int, Generator] = WeakValueDictionary()
"""The device's: a kernel is handed another object for the same generator."""
_generator_state = torch.Generator().manual_seed(0).get_state()


@contextmanager
def _draws(op: Any, named: dict[str, Any]) -> Iterator[None]:
    """Refuses a generator of the CPU; draws without any come from the device's own, and leave the CPU's as it is."""
    global _generator_state
    source = named.get("generator")
    if source is not None and source._cdata not in _generators:
        raise RuntimeError(f"{op}: expected a generator of the device {NAME!r}, found one of the CPU")
    if source is not None or torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(_generator_state)
    try:
        yield
    finally:
        _generator_state = torch.get_rng_state()
        torch.set_rng_state(before)


class _Module:
    """`torch.pretend`, as `torch.cuda`: what torch itself asks of a device's module."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    is_available = is_initialized

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        global _generator_state
        _generator_state = torch.Generator().manual_seed(seed).get_state()

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return _generator_state

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        global _generator_state
        _generator_state = state

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """For `copy.deepcopy`: torch has no allocator for the device."""
    return _storage(storage.host.clone()) if hasattr(storage, "host") else _torch_clone(storage)


_torch_clone = torch.UntypedStorage.clone


def _loaded(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """For `torch.load`: what was saved from the device, or is mapped to it."""
    return _storage(storage) if location.startswith(NAME) else None


_libraries: list[Any] = []


def register() -> torch.device:
    """The device, for the rest of the process; before its first backward pass, which starts torch's threads."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        _libraries.extend(torch.library.Library(namespace, "IMPL") for namespace in ("_", "aten"))
        every, some = _libraries
        every.fallback(_run, "PrivateUse1")
        for op in INSTEAD:
            some.impl(op.name(), partial(_run, op), "PrivateUse1")
        torch.Generator = Generator  # type: ignore[misc]
        torch.__future__.set_swap_module_params_on_conversion(True)  # as on CUDA, tied parameters stay one
        torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]
        torch.serialization.register_package(0, lambda storage: None, _loaded)
    return torch.device(NAME, 0)
