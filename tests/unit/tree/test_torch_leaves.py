"""torch tensors: their memory without a copy on the way in and out; what is no dense array is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tieredckpt.errors import Invalid
from tieredckpt.tree import as_array_leaf, flatten, host_view, match, unflatten, writable_view
from tieredckpt.tree.arrays import small_bytes

torch = pytest.importorskip("torch")

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def tensor_of(dtype: str) -> Any:
    """Every byte pattern that fits, in 4 rows."""
    if dtype == "bool":
        return torch.tensor([[True, False]] * 4)
    raw = torch.arange(256, dtype=torch.uint8).repeat(2)
    return raw.view(getattr(torch, dtype)).reshape(4, -1)


def raw(tensor: Any) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())


def view_of(value: object) -> np.ndarray[Any, Any]:
    leaf = as_array_leaf("k", value)
    assert leaf is not None
    view = host_view(leaf)
    assert (view.shape, view.dtype) == (leaf.shape, leaf.dtype)
    return view


def restore(saved: object, like: object) -> Any:
    flat = flatten(saved)
    return match(like, flat.structure).build({leaf.key: host_view(leaf).copy() for leaf in flat.arrays})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_viewed_in_place_and_comes_back_bit_for_bit(dtype: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    tensor = tensor_of(dtype)
    view = view_of(tensor)
    assert view.ctypes.data == tensor.data_ptr()
    assert view.dtype.name == dtype
    assert view.tobytes() == raw(tensor)
    got = restore({"t": tensor}, {"t": torch.empty_like(tensor)})["t"]
    assert (got.dtype, got.shape, raw(got)) == (tensor.dtype, tensor.shape, raw(tensor))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_layout_is_viewed_in_place(dtype: str) -> None:
    base = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    for tensor in (base.permute(2, 0, 1), base[:, ::2], base[0, 0, 0], base[:0], base[:1].expand(5, 3, 4)):
        view = view_of(tensor)
        assert view.tobytes() == raw(tensor)
        assert not tensor.numel() or view.ctypes.data == tensor.data_ptr()


def test_lazy_conjugates_and_negations_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert view_of(tensor.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert view_of(tensor.conj().imag).tolist() == [-2.0, 4.0]


def test_gradients_and_parameters_are_restored_as_such() -> None:
    like = {
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "frozen": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
        "grad": torch.zeros(2, requires_grad=True),
        "plain": torch.zeros(2),
        "meta": torch.zeros(2, device="meta"),
        "bf16": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device="meta")),
    }
    saved = {name: torch.ones(2, dtype=tensor.dtype) for name, tensor in like.items()}
    got = restore(saved, like)
    for name, tensor in like.items():
        assert type(got[name]) is type(tensor)
        assert got[name].requires_grad == tensor.requires_grad
        assert got[name].device.type == "cpu"
        assert got[name].tolist() == [1, 1]


def test_a_restored_tensor_shares_writable_memory_and_copies_read_only() -> None:
    like = {"t": torch.zeros(3)}
    found = match(like, flatten(like).structure)
    memory = np.zeros(3, np.float32)
    tensor: Any = found.build({"t": memory})
    assert tensor["t"].data_ptr() == memory.ctypes.data
    memory.flags.writeable = False
    copied: Any = found.build({"t": memory})
    copied["t"].fill_(1)
    assert memory.tolist() == [0, 0, 0]


def test_a_state_dict_comes_back_loadable_with_its_metadata() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert [leaf.key for leaf in flatten(saved).arrays][:2] == ["model/0.weight", "model/0.bias"]
    fresh = {"model": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()}
    got = restore({"model": saved["model"]}, fresh)["model"]
    assert got._metadata == saved["model"]._metadata
    assert all(torch.equal(got[name], tensor) for name, tensor in saved["model"].items())
    plain = restore(saved, saved)["optimizer"]
    assert plain["param_groups"] == saved["optimizer"]["param_groups"]
    assert torch.equal(plain["state"][0]["exp_avg"], saved["optimizer"]["state"][0]["exp_avg"])


def test_without_like_a_tensor_is_a_numpy_array() -> None:
    flat = flatten({"t": torch.arange(3)})
    got: Any = unflatten(flat.structure, {leaf.key: host_view(leaf) for leaf in flat.arrays})
    assert type(got["t"]) is np.ndarray
    assert got["t"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_to_a_writable_view_is_in_the_tensor(dtype: str) -> None:
    for tensor in (
        torch.zeros(2, 3, dtype=getattr(torch, dtype)),
        torch.nn.Parameter(torch.zeros(2, 3, dtype=getattr(torch, dtype))),
    ):
        writable_view("k", tensor)[...] = 7
        assert tensor.tolist() == [[7.0] * 3] * 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(4, 4).T[1:], "not contiguous"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "not contiguous"),
        (lambda: torch._neg_view(torch.zeros(2)), "lazy view"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_restored_into_is_refused_by_key(make: Any, why: str) -> None:
    with pytest.raises(Invalid, match=rf"'a/b'.*{why}"):
        writable_view("a/b", make())


def test_a_module_that_is_a_dataclass_is_refused_as_its_parameters_are_no_fields() -> None:
    @dataclasses.dataclass(eq=False)
    class Net(torch.nn.Module):
        width: int

        def __post_init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(self.width, 1)

    with pytest.raises(Invalid, match=r"leaf 'net': a .*Net cannot be stored; give its state_dict\(\)"):
        flatten({"net": Net(2)})


if torch.distributed.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor


class Wrapped(torch.Tensor):
    pass


class Distributed(torch.Tensor):
    def to_local(self) -> Any:
        raise NotImplementedError


def freed() -> Any:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta tensor has no data"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.zeros(2, dtype=torch.complex32), "complex32"),
        (lambda: torch.zeros(2).as_subclass(Wrapped), "Wrapped"),
        (lambda: torch.zeros(2).as_subclass(Distributed), r"to_local\(\)"),
        (lambda: AsyncCollectiveTensor(torch.zeros(2)), "AsyncCollectiveTensor"),
        (freed, "freed"),
    ],
)
def test_what_is_no_dense_array_is_refused_by_key(make: Any, why: str) -> None:
    with pytest.raises(Invalid, match=rf"'a/b'.*{why}"):
        flatten({"a": {"b": make()}})


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tensors_are_copied_with_their_bytes_whatever_their_layout(dtype: str) -> None:
    one = tensor_of(dtype)
    tensors = [one, one[1:2], one.T, torch.nn.Parameter(one, requires_grad=False), one.flip(0), one[0, 0]]
    if dtype.startswith("complex"):
        tensors.append(one.conj())
    leaves = flatten(tensors).arrays
    assert small_bytes(leaves) == [host_view(leaf).tobytes() for leaf in leaves]


def test_a_thousand_scalars_of_an_optimizer_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(1000)]
    optimizer = torch.optim.Adam(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    copies = []
    copied = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or copied(tensor))
    leaves = [leaf for leaf in flatten(optimizer.state_dict()).arrays if leaf.key.endswith("/step")]
    assert small_bytes(leaves) == [np.float32(1).tobytes()] * 1000
    assert copies == [(1000,)]


def test_small_tensors_are_gathered_in_batches_and_one_by_one_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaves = flatten([torch.full((1 << 14,), float(i)) for i in range(300)]).arrays
    stack, gathered = torch.stack, []

    def short_of_memory(tensors: list[torch.Tensor]) -> torch.Tensor:
        gathered.append(sum(tensor.nbytes for tensor in tensors))
        if len(gathered) == 2:
            raise torch.OutOfMemoryError("no memory is left")
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", short_of_memory)
    assert small_bytes(leaves) == [host_view(leaf).tobytes() for leaf in leaves]
    assert len(gathered) == 2
    assert max(gathered) <= 16 << 20
