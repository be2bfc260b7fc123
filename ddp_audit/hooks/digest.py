"""64-bit digests of batches, samples, tensors and datasets. Pure: nothing is changed, nothing kept.

Two families. *Words*: a row of a dense array is read as unsigned integers of 8 bytes (4 or 1 when
its length is no multiple), multiplied by odd weights of their column and summed mod 2^64; one
multiplication table serves numpy here and torch on a device (``device_digest.py``), so a CUDA
tensor and its CPU copy have the same digest. *Bytes*: everything else, and whole rows, through
xxh3-64, or BLAKE2b where xxhash is missing.

Memory of CPU tensors is read through the array interface and never through a torch operator: an
operator would be seen by the user's dispatch modes and profilers, and ``Tensor.numpy()`` makes the
storage unresizable for good. No ``hash()``, ``id()`` or ``repr()`` of user objects, so digests are
equal across processes; no property is evaluated, no iterator advanced.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import sys
import types
import uuid
from collections import UserDict, UserList
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
FULL_BYTES = 256 << 10  # a leaf up to this size is read whole
WINDOW_WORDS = 4096  # words read of a larger leaf, about
TAIL_WORDS = 8  # the end of each row is always read: padded token rows differ there or nowhere
MAX_NODES = 4096  # objects looked at in one batch; a list of scalars per sample is within it
MAX_DEPTH = 12
PARAMETER_WORDS = 16  # words read of a parameter for the drift digest
GRADIENT_WORDS = 512  # words read of a gradient

_GOLDEN = 0x9E3779B97F4A7C15
_C1, _C2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_N1, _N2 = np.uint64(_C1), np.uint64(_C2)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

try:
    import xxhash

    HASH_NAME = "xxh3_64"

    def bytes_digest(data: Any) -> int:
        """Digest of a buffer, never 0."""
        return int(xxhash.xxh3_64_intdigest(data)) or 1

except ImportError:
    import hashlib

    HASH_NAME = "blake2b"

    def bytes_digest(data: Any) -> int:
        """Digest of a buffer, never 0."""
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def mix(value: int) -> int:
    """The splitmix64 finaliser: every output bit depends on every input bit."""
    value = ((value ^ (value >> 30)) * _C1) & MASK
    value = ((value ^ (value >> 27)) * _C2) & MASK
    return value ^ (value >> 31)


def mix_array(values: U64) -> U64:
    """``mix`` for each element; a new array."""
    out = values ^ (values >> _S30)
    out *= _N1
    out ^= out >> _S27
    out *= _N2
    out ^= out >> _S31
    return out


def odd_weights(columns: U64) -> U64:
    """The odd weight of each column number."""
    return mix_array((columns + np.uint64(1)) * np.uint64(_GOLDEN)) | np.uint64(1)


def leaf_factor(leaf: int) -> int:
    """The odd factor of the leaf with this number, so that leaves cannot change places."""
    return mix(((leaf + 1) * _C2 + _GOLDEN) & MASK) | 1


_LEAF_FACTORS = tuple(np.uint64(leaf_factor(i)) for i in range(64))


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Which words of a row are read: every ``stride``-th, and the last ``tail``.

    Attributes:
        weights: of the strided words; ``tail_weights`` of the tail.
    """

    stride: int
    tail: int
    weights: U64
    tail_weights: U64


@functools.lru_cache(maxsize=512)
def window(num_rows: int, num_words: int, num_bytes: int, budget: int = WINDOW_WORDS, full: int = FULL_BYTES) -> Window:
    """The window for a leaf of ``num_rows`` x ``num_words``; stride 1 and no tail reads it whole."""
    stride, tail = 1, 0
    if num_bytes > full:
        stride = max(1, -(-num_words * num_rows // budget))
        if stride > 1:
            tail = min(TAIL_WORDS, num_words)
            stride = min(stride, num_words)
    columns = np.arange(0, num_words, stride, dtype=np.uint64)
    tails = np.arange(num_words - tail, num_words, dtype=np.uint64) + np.uint64(num_words)
    return Window(stride, tail, odd_weights(columns), odd_weights(tails))


def _weighted(words: Any, weights: U64) -> U64:
    """Sum of words times weights per row, mod 2^64. ``words``: (rows, columns), unsigned."""
    if words.dtype != np.uint64:
        words = words.astype(np.uint64)
    if words.size < 4096:
        return words.dot(weights)  # type: ignore[no-any-return]
    return np.einsum("ij,j->i", words, weights)  # type: ignore[no-any-return]


def row_sums(words: Any, spec: Window) -> U64:
    """Raw sums of the rows, before any finaliser."""
    sums = _weighted(words if spec.stride == 1 else words[:, :: spec.stride], spec.weights)
    if spec.tail:
        sums = sums + _weighted(words[:, words.shape[1] - spec.tail :], spec.tail_weights)
    return sums


class _Memory:
    """Shows memory to numpy without a torch operator."""

    __slots__ = ("__array_interface__",)

    def __init__(self, pointer: int, shape: tuple[int, ...], kind: str, strides: tuple[int, ...] | None = None) -> None:
        self.__array_interface__ = {
            "shape": shape,
            "typestr": kind,
            "data": (pointer, True),
            "strides": strides,
            "version": 3,
        }


_WORD_KINDS = {8: "<u8", 4: "<u4", 1: "|u1"}


def word_size(row_bytes: int) -> int:
    """Bytes per word for rows of this length."""
    return 8 if row_bytes % 8 == 0 else 4 if row_bytes % 4 == 0 else 1


def tensor_words(tensor: Any, num_rows: int) -> Any:
    """A dense CPU tensor as (num_rows, words), unsigned; a view unless it is not contiguous.

    The caller keeps the tensor alive while it uses the result.
    """
    size, total = tensor.element_size(), tensor.numel()
    num_bytes = size * total
    row_bytes = num_bytes // num_rows if num_rows else 0
    width = word_size(row_bytes)
    if tensor.is_contiguous():
        shape = (num_rows, row_bytes // width)
        return np.asarray(_Memory(tensor.data_ptr(), shape, _WORD_KINDS[width]))
    strides = tuple(s * size for s in tensor.stride())
    kind = "<c16" if size == 16 else f"<u{size}" if size > 1 else "|u1"
    array = np.ascontiguousarray(np.asarray(_Memory(tensor.data_ptr(), tuple(tensor.shape), kind, strides)))
    return array.reshape(-1).view(_WORD_KINDS[width]).reshape(num_rows, row_bytes // width)


def array_words(array: npt.NDArray[Any], num_rows: int) -> Any:
    """An ndarray without objects as (num_rows, words), unsigned."""
    row_bytes = array.nbytes // num_rows if num_rows else 0
    width = word_size(row_bytes)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype("u1") if width == 1 else _WORD_KINDS[width]).reshape(num_rows, row_bytes // width)


def _torch() -> Any:
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor, without importing torch."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def dense_parts(tensor: Any) -> tuple[Any, ...] | None:
    """The dense tensors that make up a tensor: itself, or values with indices or offsets.

    ``None`` when it has no memory of its own (meta, fake, functional, unknown wrapper subclasses).
    """
    torch = _torch()
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        if tensor.device.type == "meta":
            return None
        if tensor.layout is torch.strided:
            if tensor.is_nested:
                return (tensor._nested_tensor_size(), tensor.values())
            if tensor.is_quantized:
                return (tensor.int_repr(),)
            if tensor.is_conj() or tensor.is_neg():
                return (tensor.resolve_conj().resolve_neg(),)
            return (tensor,)
        if tensor.layout is torch.sparse_coo:
            return (tensor._indices(), tensor._values())
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return None
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:  # DTensor
        return dense_parts(local)
    values, offsets = getattr(tensor, "_values", None), getattr(tensor, "_offsets", None)
    if is_tensor(values) and is_tensor(offsets):  # jagged nested tensor
        parts = [dense_parts(offsets), dense_parts(values)]
        return None if None in parts else tuple(t for part in parts if part for t in part)
    return None


DeviceSums = Callable[[Any, int, Window], Any]


@dataclasses.dataclass(slots=True)
class DeviceParts:
    """What of a batch digest lies on a device.

    Attributes:
        rows: int64 tensors, shape (samples,), each with its factor.
        singles: int64 tensors, shape (1,).
        rests: parts that belong to no sample, in order; a pair is the head of a single and its number.
    """

    rows: list[tuple[Any, int]] = dataclasses.field(default_factory=list)
    singles: list[Any] = dataclasses.field(default_factory=list)
    rests: list[int | tuple[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class BatchDigest:
    """What was found in one batch.

    Attributes:
        content: digest over everything; 0 when it lies (partly) on a device.
        samples: one digest per sample, or ``None`` without a leading batch axis.
        whole: likewise over all bytes; only when asked for, and only beside windowed ones.
        num_samples: length of the batch axis, 0 = none.
        windowed: some leaf was not read whole.
        opaque: number of parts that could not be read.
        device: sums that are on a device still; ``samples`` holds the host's raw sums then.
    """

    content: int = 0
    samples: U64 | None = None
    whole: U64 | None = None
    num_samples: int = 0
    windowed: bool = False
    opaque: int = 0
    device: DeviceParts | None = None


_PLAIN_STR = (
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    range,
    slice,
    pathlib.PurePath,
)
_OPAQUE = (
    types.GeneratorType,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CoroutineType,
    type,
)


def tensor_head(tensor: Any) -> int:
    """Digest of a tensor's shape."""
    return bytes_digest(str(tuple(tensor.shape)).encode())


class _Walk:
    """One pass over one batch."""

    __slots__ = (
        "depth", "device", "device_sums", "leaf", "nodes", "opaque", "rests", "rows", "seen", "sums", "whole",
        "whole_sums", "windowed",
    )  # fmt: skip

    def __init__(self, rows: int, whole: bool, device_sums: DeviceSums | None) -> None:
        self.rows = rows
        self.sums: U64 = np.zeros(rows, dtype=np.uint64)
        self.whole = whole
        self.whole_sums: U64 = np.zeros(rows if whole else 0, dtype=np.uint64)
        self.rests: list[int | tuple[int, int]] = []
        self.leaf = 0
        self.nodes = 0
        self.opaque = 0
        self.windowed = False
        self.device = DeviceParts()
        self.device_sums = device_sums
        self.depth = 0
        self.seen: set[int] = set()

    def factor(self) -> np.uint64:
        self.leaf += 1
        return _LEAF_FACTORS[self.leaf] if self.leaf < 64 else np.uint64(leaf_factor(self.leaf))

    def add_rest(self, value: int) -> None:
        """Take in a part that belongs to no single sample."""
        self.rests.append(value)

    # ------------------------------------------------------------- per sample

    def fold(self, value: Any, top: bool = False) -> None:
        """Take in a part of the batch, per sample where its axis shows."""
        self.nodes += 1
        if self.nodes > MAX_NODES or self.depth > MAX_DEPTH:
            self.opaque += 1
            return
        kind = type(value)
        if is_tensor(value):
            self.fold_tensor(value)
        elif isinstance(value, np.ndarray):
            self.fold_array(value)
        elif isinstance(value, (list, tuple, UserList)):
            items = value.data if isinstance(value, UserList) else value
            if self.rows and len(items) == self.rows and not (top and self._is_fields(items)):
                self.fold_samples(items)
            else:
                self.depth += 1
                for item in items:
                    self.fold(item)
                self.depth -= 1
        elif (fields := mapping_of(value)) is not None:
            self.depth += 1
            for key in sorted(fields, key=str):
                self.fold(fields[key])
            self.depth -= 1
        elif kind in (str, bytes, int, float, bool, type(None)) or (names := fields_of(value)) is None:
            self.add_rest(self.single(value))
        elif id(value) not in self.seen:
            self.seen.add(id(value))
            self.depth += 1
            for name in sorted(names):
                self.fold(names[name])
            self.depth -= 1

    def _is_fields(self, items: Any) -> bool:
        """Whether a list as long as the batch holds columns and not samples: (x, y) of two rows."""
        return all(first_dim(item) == self.rows for item in items)

    def fold_samples(self, items: Any) -> None:
        values = self._numbers(items)
        if values is None:
            values = np.fromiter((self.single(item) for item in items), dtype=np.uint64, count=len(items))
        scaled = mix_array(values) * self.factor()
        self.sums += scaled
        if self.whole:
            self.whole_sums += scaled

    @staticmethod
    def _numbers(items: Any) -> U64 | None:
        """A list of plain numbers at once; ``None`` for anything else."""
        kinds = set(map(type, items))
        if kinds == {int} or kinds == {bool}:
            try:
                return np.array(items, dtype=np.int64).view(np.uint64)
            except OverflowError:
                return None
        if kinds == {float}:
            return np.array(items, dtype=np.float64).view(np.uint64)
        return None

    def fold_tensor(self, tensor: Any) -> None:
        parts = dense_parts(tensor)
        if parts is None:
            self.opaque += 1
            return
        if len(parts) == 1 and self.rows and parts[0].dim() > 0 and parts[0].shape[0] == self.rows:
            part = parts[0]
            if part.numel() == 0:
                self.add_rest(part.dim())
            elif part.device.type == "cpu":
                self.fold_words(tensor_words(part, self.rows))
            else:
                self.fold_device(part, self.rows, True)
            return
        for part in parts:
            if part.device.type == "cpu":
                self.add_rest(self.tensor_single(part))
            else:
                self.fold_device(part, 1, False)

    def fold_device(self, tensor: Any, rows: int, per_sample: bool) -> None:
        if self.device_sums is None:
            self.opaque += 1
            return
        if tensor.numel() == 0:
            self.add_rest(tensor_head(tensor))
            return
        num_bytes = tensor.numel() * tensor.element_size()
        spec = window(rows, num_bytes // rows // word_size(num_bytes // rows), num_bytes)
        sums = self.device_sums(tensor, rows, spec)
        if sums is None:  # a graph is being captured
            self.opaque += 1
            return
        self.windowed |= spec.stride > 1
        if per_sample:
            self.device.rows.append((sums, int(self.factor())))
        else:
            self.rests.append((tensor_head(tensor), len(self.device.singles)))
            self.device.singles.append(sums)

    def fold_array(self, array: npt.NDArray[Any]) -> None:
        if array.dtype.hasobject or array.dtype.kind == "T":
            self.fold(array.tolist())
        elif array.ndim and self.rows and array.shape[0] == self.rows and array.size:
            self.fold_words(array_words(array, self.rows))
        else:
            self.add_rest(self.array_single(array))

    def fold_words(self, words: Any) -> None:
        spec = window(words.shape[0], words.shape[1], words.nbytes)
        factor = self.factor()
        sums = row_sums(words, spec)
        sums *= factor
        self.sums += sums
        if spec.stride > 1:
            self.windowed = True
            if self.whole:
                rows = np.ascontiguousarray(words)
                full = np.fromiter((bytes_digest(row) for row in rows), dtype=np.uint64, count=len(rows))
                self.whole_sums += full * factor
        elif self.whole:
            self.whole_sums += sums

    # ------------------------------------------------------------- one value

    def tensor_single(self, tensor: Any) -> int:
        """Digest of a dense CPU tensor as one value: shape and words."""
        head = tensor_head(tensor)
        return self._words_single(tensor_words(tensor, 1), head) if tensor.numel() else head

    def array_single(self, array: npt.NDArray[Any]) -> int:
        head = bytes_digest(f"{array.shape}{array.dtype.kind}".encode())
        return head if array.size == 0 or array.nbytes == 0 else self._words_single(array_words(array, 1), head)

    def _words_single(self, words: Any, head: int) -> int:
        spec = window(1, words.shape[1], words.nbytes)
        self.windowed |= spec.stride > 1
        return mix(int(row_sums(words, spec)[0]) ^ head)

    def single(self, value: Any) -> int:
        """Digest of any value as one number; counts what cannot be read."""
        self.nodes += 1
        if self.nodes > MAX_NODES or self.depth > MAX_DEPTH:
            self.opaque += 1
            return 3
        kind = type(value)
        if kind is str:
            return bytes_digest(value.encode("utf-8", "surrogatepass"))
        if kind is int:
            return mix((value & MASK) ^ 0x11) if -(1 << 63) <= value < 1 << 64 else bytes_digest(str(value).encode())
        if kind is float:
            return mix(int(np.float64(value).view(np.uint64)) ^ 0x22)
        if value is None or kind is bool:
            return 5 if value is None else 7 + value
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes_digest(bytes(value))
        if is_tensor(value):
            parts = dense_parts(value)
            if parts is None or any(part.device.type != "cpu" for part in parts):
                self.opaque += 1
                return 3
            return self._combine(self.tensor_single(part) for part in parts)
        if isinstance(value, np.ndarray):
            return self.single(value.tolist()) if value.dtype.hasobject else self.array_single(value)
        if isinstance(value, np.generic):
            return bytes_digest(value.tobytes())
        if isinstance(value, enum.Enum):
            return mix(bytes_digest(value.name.encode()) ^ 0x33)
        if isinstance(value, complex):
            return bytes_digest(np.complex128(value).tobytes())
        if isinstance(value, _PLAIN_STR):
            return bytes_digest(str(value).encode())
        if isinstance(value, (int, float, str)):  # subclasses of them
            if isinstance(value, int):
                return self.single(int.__int__(value))
            if isinstance(value, float):
                return self.single(float.__float__(value))
            return self.single(str.__str__(value))
        if isinstance(value, (list, tuple, UserList)):
            return self._deeper(
                value,
                lambda: self._combine(
                    map(self.single, list.__iter__(value) if isinstance(value, list) else iter(value))
                ),
            )
        if isinstance(value, (set, frozenset)):
            return self._deeper(value, lambda: self._combine(sorted(map(self.single, value))))
        if (fields := mapping_of(value)) is not None:
            found = fields
            return self._deeper(value, lambda: self._combine(self.single(found[key]) for key in sorted(found, key=str)))
        if (image := image_bytes(value)) is not None:
            return bytes_digest(image)
        names = fields_of(value)
        if not names:
            self.opaque += 1
            return bytes_digest(kind.__qualname__.encode())
        return self._deeper(value, lambda: self._combine(self.single(names[name]) for name in sorted(names)))

    def _deeper(self, value: Any, walk: Callable[[], int]) -> int:
        if id(value) in self.seen:
            return 4  # an object that holds itself
        self.seen.add(id(value))
        self.depth += 1
        try:
            return walk()
        finally:
            self.depth -= 1
            self.seen.discard(id(value))

    @staticmethod
    def _combine(values: Iterator[int] | list[int]) -> int:
        out = 9
        for value in values:
            out = mix((out * _C1 + value) & MASK)
        return out


def mapping_of(value: Any) -> Mapping[Any, Any] | None:
    """The plain dict inside a mapping, read without its own ``__getitem__``; ``None`` for no mapping.

    A lazy mapping decodes in ``__getitem__``; such objects are walked by their fields instead.
    """
    if isinstance(value, dict):
        return (
            value
            if type(value).__iter__ is dict.__iter__ and type(value).__getitem__ is dict.__getitem__
            else dict(dict.items(value))
        )
    if isinstance(value, types.MappingProxyType):
        return value
    if isinstance(value, UserDict):
        data = vars(value).get("data")
        return data if isinstance(data, dict) else None
    return None


def fields_of(value: Any) -> dict[str, Any] | None:
    """The object's own fields by name; ``None`` when it has none that can be read safely."""
    if isinstance(value, (*_OPAQUE, enum.Enum, set, frozenset, np.generic)):
        return None
    if hasattr(type(value), "__next__") or type(value).__module__ in ("builtins", "_io", "io"):
        return None
    torch = _torch()
    if torch is not None and isinstance(value, torch.nn.Module):
        return None
    if isinstance(value, _PLAIN_STR) or is_image(value):
        return None
    fields: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name in (
            kind.__dict__.get("__slots__", ())
            if not isinstance(kind.__dict__.get("__slots__", ()), str)
            else (kind.__dict__["__slots__"],)
        ):
            slot = kind.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    fields[name] = slot.__get__(value)
                except AttributeError:
                    continue  # an empty slot
    own = (
        getattr(value, "__dict__", None) if "__dict__" in dir(type(value)) or hasattr(type(value), "__dict__") else None
    )
    if isinstance(own, dict):
        fields.update((name, item) for name, item in own.items() if isinstance(name, str))
    return fields or None


def is_image(value: Any) -> bool:
    """Whether it is a PIL image, told by its class and not by an import."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def image_bytes(value: Any) -> bytes | None:
    """Mode, size and pixels of a decoded PIL image; ``None`` for others and for images not yet decoded."""
    if not is_image(value):
        return None
    fields = vars(value)
    if fields.get("tile") or (fields.get("_im") is None and fields.get("im") is None):
        return None
    data: bytes = value.tobytes()
    return f"{fields.get('_mode')}{fields.get('_size')}".encode() + data


def first_dim(value: Any) -> int | None:
    """Length of the first axis of a dense leaf; ``None`` for anything else."""
    if isinstance(value, np.ndarray):
        return value.shape[0] if value.ndim else None
    if is_tensor(value):
        torch = _torch()
        if value.layout is torch.strided and not value.is_nested and value.dim() > 0:
            return int(value.shape[0])
    return None


def _shape_hints(value: Any, dims: list[int], lists: list[int], depth: int, budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0 or depth > 4:
        return
    dim = first_dim(value)
    if dim is not None:
        dims.append(dim)
    elif is_tensor(value):
        return
    elif isinstance(value, (list, tuple)):
        if not hasattr(value, "_fields"):
            lists.append(len(value))
        for item in value[:16]:
            _shape_hints(item, dims, lists, depth + 1, budget)
    elif (fields := mapping_of(value)) is not None:
        for item in fields.values():
            _shape_hints(item, dims, lists, depth + 1, budget)
    elif not isinstance(value, (str, bytes, int, float, type(None), enum.Enum)):
        names = fields_of(value)
        if names:
            for item in names.values():
                _shape_hints(item, dims, lists, depth + 1, budget)


def row_sizes(value: Any, rows: int) -> frozenset[int]:
    """Numbers per sample of the dense leaves of ``rows`` samples; single ones (labels, lengths) are left out."""
    sizes: set[int] = set()
    if rows:
        _row_sizes(value, rows, sizes, 0, [64])
    return frozenset(sizes)


def _row_sizes(value: Any, rows: int, sizes: set[int], depth: int, budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0 or depth > 4:
        return
    dim = first_dim(value)
    if dim is not None:
        size = (value.size if isinstance(value, np.ndarray) else value.numel()) // dim if dim == rows else 0
        if size > 1:
            sizes.add(size)
    elif isinstance(value, (list, tuple)):
        for item in value[:16]:
            _row_sizes(item, rows, sizes, depth + 1, budget)
    elif not is_tensor(value) and (fields := mapping_of(value)) is not None:
        for item in fields.values():
            _row_sizes(item, rows, sizes, depth + 1, budget)


def batch_axis(value: Any, hint: int | None) -> int:
    """Length of the leading batch axis; 0 when there is none.

    Args:
        hint: number of samples that were asked for, where that is known. The last batch of a
            stream may be shorter than the loader's batch size: then the leaves decide.
    """
    dims: list[int] = []
    lists: list[int] = []
    _shape_hints(value, dims, lists, 0, [64])
    if hint and (hint in dims or hint in lists):
        return hint
    if dims and dims.count(dims[0]) == len(dims):
        return dims[0]
    if not dims:
        inner = [n for n in lists[1:] if n == lists[1]] if len(lists) > 1 else []
        if inner and len(inner) == len(lists) - 1 and isinstance(value, (list, tuple)):
            return inner[0]
        return lists[0] if len(lists) == 1 and lists[0] > 1 else 0
    return max(set(dims), key=dims.count) if dims.count(max(set(dims), key=dims.count)) * 2 > len(dims) else 0


def fold_rests(rests: list[int | tuple[int, int]], singles: list[int]) -> int:
    """One number over the parts that belong to no sample, in order."""
    out = 0
    for item in rests:
        value = item if isinstance(item, int) else mix(singles[item[1]] ^ item[0])
        out = mix((out * _C1 + value + 1) & MASK)
    return out


def finish(rows: int, sums: U64, rest: int) -> tuple[U64 | None, int]:
    """Sample digests, and the digest of the batch, from raw sums. None is ever 0."""
    if not rows:
        return None, mix((rest + _GOLDEN) & MASK) or 1
    samples = mix_array(sums)
    np.maximum(samples, np.uint64(1), out=samples)
    weights = window(1, rows, rows * 8, budget=rows, full=MASK).weights
    return samples, mix((int(samples.dot(weights)) + rest * _C2) & MASK) or 1


def batch_digest(
    value: Any, hint: int | None = None, *, whole: bool = False, device_sums: DeviceSums | None = None
) -> BatchDigest:
    """Digest of anything a loader yields or a forward takes.

    Args:
        value: the batch; nested in any way.
        hint: expected number of samples.
        whole: also digest every byte per sample where a leaf is only windowed.
        device_sums: makes sums of tensors that are not on the CPU; without it they are opaque.
    """
    rows = batch_axis(value, hint)
    walk = _Walk(rows, whole, device_sums)
    walk.fold(value, top=True)
    out = BatchDigest(num_samples=rows, windowed=walk.windowed, opaque=walk.opaque)
    if walk.device.rows or walk.device.singles:
        walk.device.rests = walk.rests
        out.device, out.samples = walk.device, walk.sums
        return out
    out.samples, out.content = finish(rows, walk.sums, fold_rests(walk.rests, []))
    if walk.leaf == 0 and not walk.rests and walk.opaque:
        out.content, out.samples = 0, None  # nothing at all could be read
    if whole and walk.windowed and rows:
        out.whole = np.maximum(mix_array(walk.whole_sums), np.uint64(1))
    return out


# --------------------------------------------------------------------------- lists of tensors


def value_digest(value: Any) -> tuple[int, int]:
    """Digest of one value of any kind, and how many parts of it could not be read."""
    walk = _Walk(0, False, None)
    return walk.single(value) or 1, walk.opaque


def whole_digest(tensors: list[Any], limit: int = 1 << 30) -> int:
    """Digest of every byte of dense CPU tensors, in order; windowed per tensor beyond ``limit`` bytes in all."""
    total = sum(t.numel() * t.element_size() for t in tensors)
    out = 1
    for tensor in tensors:
        if not tensor.numel():
            continue
        words = tensor_words(tensor, 1)
        if total <= limit:
            value = bytes_digest(words)
        else:
            value = int(row_sums(words, window(1, words.shape[1], words.nbytes))[0])
        out = mix((out * _C1 + value) & MASK)
    return out or 1


def sampled_digest(tensor: Any, budget: int) -> int:
    """Digest of about ``budget`` words of a dense CPU tensor: evenly strided, and its end."""
    if not tensor.numel():
        return 1
    words = tensor_words(tensor, 1)
    spec = window(1, words.shape[1], words.nbytes, budget, 0)
    return mix(int(row_sums(words, spec)[0])) or 1


def combine(values: list[int]) -> int:
    """One digest of several, in order; never 0."""
    return bytes_digest(np.array(values, dtype=np.uint64))


def layout_digest(tensors: list[Any]) -> int:
    """Digest of shapes and dtypes, in order."""
    return bytes_digest(";".join(f"{tuple(t.shape)}{t.dtype}" for t in tensors).encode())


def dataset_digest(dataset: Any) -> int | None:
    """Fingerprint of a dataset's own fields; ``None`` when nothing of it can be read.

    A part that cannot be read (an open file, a function) is left out: the rest still tells apart
    two datasets. Without any field that holds data it says nothing.
    """
    fields = fields_of(dataset)
    if not fields:
        return None
    walk = _Walk(0, False, None)
    walk.nodes = -4 * MAX_NODES  # once per loader: a list of file names may be long
    value = walk.single(dataset)
    return None if walk.opaque and walk.opaque * 2 >= walk.nodes + 4 * MAX_NODES else value or 1
