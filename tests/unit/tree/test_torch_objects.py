"""torch's small objects and its tensors around tensors are stored without their classes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from support.objects import again, by, stored

torch = pytest.importorskip("torch")

from tieredckpt.errors import Corrupt, Invalid
from tieredckpt.format.structure import (
    DictNode,
    ObjectNode,
    TypedNode,
    encode_structure,
    walk,
)
from tieredckpt.tree import flatten, match, unflatten
from tieredckpt.tree.form import Flattener

OBJECTS = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda:3"),
    torch.device("cpu"),
    torch.device("meta"),
    torch.Size([]),
    torch.Size([2, 0, 5]),
]


@pytest.mark.parametrize("value", OBJECTS, ids=str)
def test_an_object_of_torch_comes_back(value: Any) -> None:
    tree = {"a": [value, {value}, {value: 1}]}
    for got in (again(tree, "saved"), by(tree, tree)):
        assert got == tree
        assert type(got["a"][0]) is type(value)


def test_a_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    tree = {"g": generator}
    plain, fitted = again(tree, "saved")["g"], by({"g": torch.Generator()}, tree)["g"]
    expected = torch.randn(9, generator=generator)
    assert torch.equal(torch.randn(9, generator=plain), expected)
    assert torch.equal(torch.randn(9, generator=fitted), expected)


def test_a_generator_of_a_device_that_is_not_here_is_its_state() -> None:
    node = ObjectNode("torch-generator", ["cuda:0", {"type": "bytes", "value": "AAAA"}])
    assert unflatten(DictNode(["g"], [node]), {}) == {"g": ("cuda:0", b"\0\0\0")}


@pytest.mark.parametrize(
    "node",
    [
        ObjectNode("torch-dtype", "torch.nn"),
        ObjectNode("torch-dtype", "torch._inductor"),
        ObjectNode("torch-dtype", 1),
        ObjectNode("torch-device", "os.system"),
        ObjectNode("torch-device", []),
        ObjectNode("torch-size", ["a"]),
        ObjectNode("torch-size", [True, 2]),
        ObjectNode("torch-size", 3),
        ObjectNode("torch-generator", ["cpu", {"type": "bytes", "value": "AAAA"}]),
        ObjectNode("torch-generator", ["cpu", {"type": "bytes", "value": "/" * 6740 + "//8="}]),
        ObjectNode("torch-generator", ["cpu"]),
    ],
)
def test_what_makes_no_object_of_torch_is_corrupt(node: Any) -> None:
    with pytest.raises(Corrupt, match="'x'"):
        unflatten(DictNode(["x"], [node]), {})


@dataclasses.dataclass
class Layout:
    block: int
    names: tuple[str, ...] = ("a",)


class Scaled(torch.Tensor):
    """A tensor that is made of codes and a scale, as quantized ones are."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, layout: Layout, opaque: object = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Any, scale: Any, layout: Layout, opaque: object = None) -> None:
        self.codes, self.scale, self.layout_of, self.opaque = codes, scale, layout, opaque

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], {"layout": self.layout_of, "opaque": self.opaque, "dtype": self.scale.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], context["layout"], context["opaque"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].layout_of, args[0].opaque)
        raise NotImplementedError(func)


def scaled(seed: int, *, block: int = 4, opaque: object = None, rows: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 127, (rows, 5), dtype=torch.int8, generator=generator)
    return Scaled(codes, torch.randn(rows, 1, generator=generator), Layout(block), opaque)


def test_a_wrapper_tensor_comes_back_by_the_class_of_like() -> None:
    saved, like = {"w": scaled(1), "step": 1}, {"w": scaled(2), "step": 0}
    got = by(like, saved)["w"]
    assert type(got) is Scaled
    assert torch.equal(got.codes, saved["w"].codes)
    assert torch.equal(got.scale, saved["w"].scale)
    assert [leaf.key for leaf in flatten(saved).arrays] == ["w/codes", "w/scale"]


def test_a_wrapper_that_is_a_parameter_stays_one() -> None:
    parameter = torch.nn.Parameter(scaled(1), requires_grad=False)
    got = by({"w": parameter}, {"w": parameter})["w"]
    assert type(got) is Scaled
    assert isinstance(got, torch.nn.Parameter)
    assert not got.requires_grad


def test_without_like_a_wrapper_is_what_it_consists_of_and_no_class_was_stored() -> None:
    saved = {"w": scaled(1)}
    structure, _ = stored(saved)
    for word in (b"Scaled", b"Layout", b"test_torch"):
        assert word not in encode_structure(structure)
    got = again(saved, "saved")["w"]
    assert sorted(got) == ["codes", "scale"]
    assert torch.equal(got["codes"], saved["w"].codes)


@pytest.mark.parametrize(
    ("like", "why"),
    [
        (scaled(1, block=8), "tensor of 2"),
        (scaled(1, rows=4), "tensor of 2"),
        (scaled(1, opaque=b"x"), "tensor of 2"),
        (torch.zeros(3, 5), r"like: float32\[3, 5\], step: tensor of 2"),
    ],
    ids=["description", "shape", "more", "plain"],
)
def test_a_wrapper_of_another_description_does_not_fit(like: Any, why: str) -> None:
    structure, _ = stored({"w": scaled(1)})
    with pytest.raises(Invalid, match=rf"'w' .*{why}"):
        match({"w": like}, structure)
    assert Flattener().refill({"w": like}, structure) is None


def test_a_description_that_cannot_be_compared_is_refused_by_key() -> None:
    with pytest.raises(Invalid, match=r"'w'.*function.*compared"):
        flatten({"w": scaled(1, opaque=again)})


def test_a_description_without_bottom_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(Invalid, match="'w'"):
        flatten({"w": scaled(1, opaque=endless)})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.zeros(2).to_sparse(),
    ],
    ids=["nested", "sparse"],
)
def test_other_tensors_that_are_not_dense_are_still_refused(tensor: Any) -> None:
    with pytest.raises(Invalid, match="'w'"):
        flatten({"w": tensor})


def test_state_dicts_keep_what_they_had() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    nodes = [node for _, node in walk(flatten(model.state_dict()).structure)]
    assert not any(isinstance(node, TypedNode | ObjectNode) for node in nodes)
    got = by(model.state_dict(), model.state_dict())
    assert type(got) is OrderedDict
    assert got._metadata == model.state_dict()._metadata
    assert np.array_equal(got["0.weight"], model.state_dict()["0.weight"])
