"""The `data.pkl` of a PyTorch file, understood without executing it.

A pickle is a program whose instructions may call anything. This reads the instructions with
`pickletools.genops`, which runs none, and carries out the few that a state dict of tensors is made of:
containers, numbers, texts, and calls of the handful of functions by which PyTorch spells a tensor, which
become descriptions here. Any other name or instruction is refused by what it is called.

Data flow: bytes → instructions → nested dicts of `StoredTensor` → `torch_source`, which reads the data.

Worked example: GLOBAL "torch._utils _rebuild_tensor_v2" and REDUCE with (storage 0, offset 0, size (48, 192),
stride (192, 1)) give StoredTensor("0", "FloatStorage", 9216, 0, (48, 192), (192, 1)); GLOBAL "os system" is
refused before anything after it is looked at.
"""

import dataclasses
import pickletools
from collections.abc import Callable
from typing import Any


class RefusedError(Exception):
    """A pickle that is no state dict of tensors; the message says why."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor: which storage, of which kind and size, and how its elements lie in it."""

    key: str
    storage: str
    numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Name:
    """A name that the pickle wants to call; nothing is looked up."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    kind: str
    numel: int


class _Mark:
    """Where a run of items on the stack begins."""


_STORAGES = frozenset(
    ("DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage",
     "ShortStorage", "CharStorage", "ByteStorage", "BoolStorage")
)  # fmt: skip


def read_pickle(data: bytes) -> Any:
    """What a pickle describes: containers, numbers, texts and `StoredTensor`s.

    Raises RefusedError, saying why, for anything else.
    """
    machine = _Machine()
    try:
        for instruction, argument, _ in pickletools.genops(data):
            machine.do(instruction.name, argument)
        return machine.stack[-1]  # genops ends behind STOP, or raises
    except RefusedError:
        raise
    except Exception as error:  # genops raises what it likes on damage
        raise RefusedError(f"its pickle is truncated or damaged ({_line(error)})") from None


class _Machine:
    """A stack, a memo, and what each known instruction does to them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Carries out one instruction. Raises RefusedError for one that tensors do not need."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            self.stack.append(argument)
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise RefusedError(f"its pickle has the instruction {name}, which tensors do not need")

    def since_mark(self) -> list[Any]:
        """Takes the items above the latest mark, and the mark."""
        at = max(i for i, item in enumerate(self.stack) if isinstance(item, _Mark))
        items, self.stack[at:] = self.stack[at + 1 :], []
        return items

    def put(self, index: int | None) -> None:
        """Remembers the item on top."""
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        """Makes a tuple of the top items."""
        items, self.stack[-count:] = tuple(self.stack[-count:]), []
        if len(items) != count:
            raise RefusedError("its pickle is damaged (too few items)")
        self.stack.append(items)

    def set_items(self, items: list[Any]) -> None:
        """Puts pairs into the dict below them."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise RefusedError("its pickle is damaged (items of no dict)")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, str) and key in target:
                raise RefusedError(f"its pickle has the key {key[:80]!r} twice")
            target[key] = value

    def append(self, items: list[Any]) -> None:
        """Puts items into the list below them."""
        if not isinstance(self.stack[-1], list):
            raise RefusedError("its pickle is damaged (items of no list)")
        self.stack[-1].extend(items)

    def named(self, module: str, name: str) -> None:
        """A name to call later, if it is one that tensors need."""
        wanted = _Name(module, name)
        known = wanted in _CALLS or (module == "torch" and name in _STORAGES)
        if not known:
            shown = f"{module}.{name}"[:80]
            raise RefusedError(
                f"its pickle wants to call {shown}, which is no part of a tensor; nothing was run"
            )
        self.stack.append(wanted)

    def call(self) -> None:
        """Describes what a known function would make."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Name) or function not in _CALLS or not isinstance(arguments, tuple):
            raise RefusedError("its pickle calls something that is no function")
        self.stack.append(_CALLS[function](*arguments))

    def build(self) -> None:
        """State of an ordered dict (its metadata) is dropped; nothing else may have any."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise RefusedError("its pickle sets the state of something that is no dict")

    def storage(self) -> None:
        """A storage by its persistent id: ("storage", kind, key, device, elements)."""
        _, kind, key, _, numel = self.stack.pop()
        if not isinstance(kind, _Name) or not isinstance(key, str) or not isinstance(numel, int):
            raise RefusedError("its pickle has a storage of an unknown form")
        self.stack.append(_Storage(key, kind.name, numel))


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    numbers = (offset, *shape, *stride)
    good = isinstance(storage, _Storage) and len(shape) == len(stride)
    if not good or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise RefusedError("its pickle has a tensor of an unknown form")
    return StoredTensor(storage.key, storage.kind, storage.numel, offset, tuple(shape), tuple(stride))


def _parameter(tensor: Any, *_: Any) -> StoredTensor:
    if not isinstance(tensor, StoredTensor):
        raise RefusedError("its pickle has a parameter that is no tensor")
    return tensor


def _ordered_dict(*pairs: Any) -> dict[Any, Any]:
    if pairs not in ((), ([],)):
        raise RefusedError("its pickle has an ordered dict of an unknown form")
    return {}


_CALLS: dict[_Name, Callable[..., Any]] = {
    _Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    _Name("torch._utils", "_rebuild_tensor"): _tensor,
    _Name("torch._utils", "_rebuild_parameter"): _parameter,
    _Name("collections", "OrderedDict"): _ordered_dict,
    _Name("torch", "Size"): tuple,
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict,
    "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "MARK": _Mark,
}  # fmt: skip
_VALUES = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE",
     "SHORT_BINUNICODE", "UNICODE", "BINUNICODE8")
)  # fmt: skip


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.named(str(module), str(name))


def _get(machine: _Machine, index: Any) -> None:
    machine.stack.append(machine.memo[index])


def _set_item(machine: _Machine, _: Any) -> None:
    items, machine.stack[-2:] = machine.stack[-2:], []
    machine.set_items(items)


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "BINPUT": lambda m, index: m.put(index),
    "LONG_BINPUT": lambda m, index: m.put(index),
    "PUT": lambda m, index: m.put(index),
    "MEMOIZE": lambda m, _: m.put(None),
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GET": _get,
    "GLOBAL": lambda m, text: m.named(*text.split(" ", 1)),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.storage(),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "SETITEMS": lambda m, _: m.set_items(m.since_mark()),
    "SETITEM": _set_item,
    "APPENDS": lambda m, _: m.append(m.since_mark()),
    "APPEND": lambda m, _: m.append([m.stack.pop()]),
}


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
