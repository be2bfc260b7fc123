"""Digests are equal for equal data, in any process, on any memory layout, and touch nothing."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_audit.hooks import device_digest, digest
from ddp_audit.hooks.digest import batch_digest

KINDS = """
import collections, dataclasses, datetime, decimal, enum, fractions, pathlib, uuid
import numpy as np, torch
from collections import UserDict, OrderedDict, namedtuple
Point = namedtuple("Point", "a b")
class Colour(enum.Enum): RED = 1
class Encoding(UserDict): pass
@dataclasses.dataclass
class Sample: x: object; name: str
class Slots:
    __slots__ = ("x", "y")
    def __init__(self): self.x, self.y = 1, torch.ones(2)
class Plain:
    def __init__(self): self.b, self.a = {"k": 2}, torch.arange(3)
    @property
    def trap(self): raise RuntimeError("a property was evaluated")
g = torch.Generator().manual_seed(1)
t = torch.randn(6, 4, generator=g)
def objects():
    array = np.empty(2, dtype=object); array[0], array[1] = "a", [1, 2]; return array
KINDS = {
  "float": t, "double": t.double(), "bf16": t.bfloat16(), "half": t.half(),
  "fp8": t.to(torch.float8_e4m3fn),
  "bool": t > 0, "complex": torch.complex(t, t), "conj": torch.complex(t, t).conj(),
  "strided": t.t(), "offset": t[1:, 1:],
  "expanded": t[:1].expand(5, 4), "sparse": t.relu().to_sparse(), "csr": t.relu().to_sparse_csr(),
  "jagged": torch.nested.nested_tensor([t[0], t[1, :2]], layout=torch.jagged),
  "nested": torch.nested.nested_tensor([t[:2], t[:1]]), "empty": torch.empty(0, 3), "scalar": torch.tensor(3),
  "quantized": torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "requires_grad": t.clone().requires_grad_(),
  "parameter": torch.nn.Parameter(t), "ndarray": t.numpy(), "fortran": np.asfortranarray(t.numpy()),
  "objects": objects(),
  "strings": np.array(["a", "bc"]), "npscalar": np.float32(2),
  "structured": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
  "dict": {"b": t, "a": [1, 2]}, "ordered": OrderedDict(a=1), "encoding": Encoding({"x": t}), "tuple": (t, t[:, 0]),
  "named": Point(t, 1), "list": ["a", "b"] * 3, "set": {"x", "y", "zz", 3}, "frozen": frozenset("abcdef"),
  "dataclass": Sample(t, "n"), "slots": Slots(), "plain": Plain(), "enum": Colour.RED, "none": None, "bytes": b"12",
  "date": datetime.date(2020, 1, 2), "decimal": decimal.Decimal("1.5"), "path": pathlib.PurePosixPath("/a"),
  "uuid": uuid.UUID(int=5), "range": range(4), "big": 1 << 80, "nan": float("nan"),
  "samples": [{"x": t[i]} for i in range(6)],
}
"""
SCOPE: dict = {"__name__": __name__}
exec(compile(KINDS, "kinds", "exec"), SCOPE)

PRINT = (
    KINDS
    + """
import sys
from ddp_audit.hooks.digest import batch_digest
for name, value in KINDS.items():
    found = batch_digest(value, 6)
    print(name, found.content, found.num_samples, found.opaque)
"""
)


def test_equal_in_every_process() -> None:
    outputs = set()
    for seed in ("0", "1", "77"):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PRINT],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == len(SCOPE["KINDS"])


@pytest.mark.parametrize("name", list(SCOPE["KINDS"]))
def test_kind_is_read(name: str) -> None:
    found = batch_digest(SCOPE["KINDS"][name])
    assert found.content
    assert found.opaque == 0


def test_kinds_differ() -> None:
    values = {name: batch_digest(value, 6).content for name, value in SCOPE["KINDS"].items()}
    assert (
        len({values[n] for n in ("float", "double", "half", "strided", "sparse", "csr", "jagged", "dict", "samples")})
        == 9
    )


@pytest.mark.parametrize("value", [iter([1]), (i for i in "ab"), sys.stdout, print], ids=["iter", "gen", "file", "fn"])
def test_opaque_is_counted_and_not_advanced(value: object) -> None:
    found = batch_digest([torch.ones(2, 2), value], 2)
    assert found.opaque == 1
    if hasattr(value, "__next__") and not hasattr(value, "read"):
        assert len(list(value)) > 0  # type: ignore[call-overload]


def test_layout_of_memory_does_not_matter() -> None:
    x = torch.randn(8, 6)
    base = batch_digest([x], 8)
    padded = torch.zeros(8, 9)
    padded[:, 1:7] = x
    for same in (x.t().contiguous().t(), padded[:, 1:7], x.numpy(), x.clone().requires_grad_()):
        found = batch_digest([same], 8)
        assert found.content == base.content
        assert np.array_equal(found.samples, base.samples)


def test_a_sample_has_the_same_digest_in_any_batch() -> None:
    x, y = torch.randn(8, 200), torch.arange(8)
    order = torch.randperm(8)
    a = batch_digest([x, y], 8)
    b = batch_digest([x[order], y[order]], 8)
    assert np.array_equal(a.samples[order.numpy()], b.samples)
    assert a.content != b.content
    short = batch_digest([x[:3], y[:3]], 8)
    assert short.num_samples == 3
    assert np.array_equal(short.samples, a.samples[:3])


def test_last_word_of_a_large_row_counts() -> None:
    x = torch.zeros(64, 20_000)
    y = x.clone()
    y[5, -1] = 1
    a, b = batch_digest(x, 64, whole=True), batch_digest(y, 64, whole=True)
    assert a.windowed
    assert (a.samples != b.samples).sum() == 1
    assert (a.whole != b.whole).sum() == 1
    z = x.clone()
    z[7, 2] = 1  # between the windows: only the whole digest sees it
    c = batch_digest(z, 64, whole=True)
    assert (a.samples == c.samples).all()
    assert (a.whole != c.whole).sum() == 1


def test_two_columns_are_no_two_samples() -> None:
    found = batch_digest([torch.randn(2, 3), torch.randn(2)], 2)
    assert found.num_samples == 2
    other = batch_digest([torch.randn(2, 3), torch.randn(2)], 2)
    assert found.content != other.content


def test_storage_stays_resizable_and_no_operator_is_seen() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, bf = torch.randn(4, 4), torch.randn(4, 4).bfloat16()
    with Watch():
        batch_digest({"x": x, "y": bf, "z": x.shape}, 4)
    assert not seen
    x.resize_(100)


@given(
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from(["float32", "float64", "int64", "uint8", "bfloat16", "bool", "int16"]),
)
def test_device_arithmetic_gives_the_same_value(rows: int, columns: int, dtype: str) -> None:
    x = (torch.arange(rows * columns).reshape(rows, columns) * 7919 % 251).to(getattr(torch, dtype))
    assert_same(x, rows)


@pytest.mark.parametrize("shape", [(256, 512), (64, 3, 100, 100), (3, 5001), (1, 70_000), (2048, 40)])
def test_device_arithmetic_with_windows(shape: tuple[int, ...]) -> None:
    assert_same(torch.randn(shape), shape[0])


def assert_same(x: torch.Tensor, rows: int) -> None:
    num_bytes = x.numel() * x.element_size()
    spec = digest.window(rows, num_bytes // rows // digest.word_size(num_bytes // rows), num_bytes)
    host = digest.row_sums(digest.tensor_words(x, rows), spec)
    device = device_digest.row_sums(x, rows, spec)
    assert np.array_equal(host, device.numpy().view(np.uint64))
    arrived = device_digest.send_values([x], budget=64)
    assert arrived is not None
    assert arrived(True) == [digest.sampled_digest(x, 64)]


def test_device_batch_equals_host_batch() -> None:
    x, y, single = torch.randn(6, 40), torch.arange(6), torch.randn(3, 3)
    host = batch_digest([x, y, single], 6)
    parts = digest.DeviceParts(
        rows=[
            (device_digest.row_sums(x, 6, digest.window(6, 20, 960)), digest.leaf_factor(1)),
            (device_digest.row_sums(y, 6, digest.window(6, 1, 48)), digest.leaf_factor(2)),
        ],
        singles=[device_digest.row_sums(single, 1, digest.window(1, 9, 36))],
        rests=[(digest.tensor_head(single), 0)],
    )
    late = digest.BatchDigest(num_samples=6, samples=np.zeros(6, dtype=np.uint64), device=parts)
    arrived = device_digest.send_batch(late)
    assert arrived is not None
    samples, content = arrived(True)
    assert content == host.content
    assert np.array_equal(samples, host.samples)


def test_dataset_fingerprint() -> None:
    from torch.utils.data import TensorDataset

    a, b = torch.randn(50, 3), torch.randn(50, 3)
    assert digest.dataset_digest(TensorDataset(a)) == digest.dataset_digest(TensorDataset(a.clone()))
    assert digest.dataset_digest(TensorDataset(a)) != digest.dataset_digest(TensorDataset(b))
    assert digest.dataset_digest(object()) is None


def test_sizes_of_a_sample_tell_a_part_from_a_batch() -> None:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    batch = {"input_ids": tokens, "mask": np.ones((4, 8)), "labels": torch.zeros(4), "names": ["a"] * 4}
    assert digest.row_sizes(batch, 4) == {16, 8}
    assert digest.row_sizes(((tokens[:, :5],), {}), 4) == {5}
    assert digest.row_sizes([tokens.t()], 4) == frozenset()
    assert digest.row_sizes(tokens[:0], 0) == frozenset()
