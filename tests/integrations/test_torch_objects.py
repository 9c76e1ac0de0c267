"""Objects of torch and torchao in processes of their own: without torch, and with a library that warns at import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tieredckpt.format.structure import encode_structure
from tieredckpt.tree import flatten


def run(program: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=300)


def test_without_torch_their_plain_parts_come_back() -> None:
    structure = encode_structure(flatten({"d": torch.float16, "s": torch.Size([2, 3])}).structure)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from tieredckpt.format.structure import decode_structure\n"
        "from tieredckpt.tree import unflatten\n"
        f"assert unflatten(decode_structure({structure!r}), {{}}) == {{'d': 'torch.float16', 's': (2, 3)}}\n"
    )
    run(program)


def test_quantized_weights_and_moments_of_torchao_come_back() -> None:
    pytest.importorskip("torchao")
    program = """
import warnings; warnings.simplefilter("ignore")
import torch
torch.compile = lambda function, **_: function  # torchao compiles the step of its optimizers
from torchao.optim import AdamW8bit
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from tieredckpt.format.structure import decode_structure, encode_structure
from tieredckpt.tree import flatten, host_view, match

def stepped(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 256)
    optimizer = AdamW8bit(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    return {"optimizer": optimizer.state_dict(), "model": model.state_dict()}

def quantized(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model.state_dict()

for make in (stepped, quantized):
    saved, like = make(1), make(2)
    flat = flatten(saved)
    bits = {leaf.key: host_view(leaf).tobytes() for leaf in flat.arrays}
    structure = decode_structure(encode_structure(flat.structure))
    got = match(like, structure).build({leaf.key: host_view(leaf).copy() for leaf in flat.arrays})
    assert {leaf.key: host_view(leaf).tobytes() for leaf in flatten(got).arrays} == bits
    assert len(bits) > 3, bits
moment = stepped(1)["optimizer"]["state"][0]["exp_avg"]
assert type(moment).__name__ == "OptimState8bit"
"""
    run(program)


def test_an_optimizer_with_quantized_moments_goes_on_from_a_store(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    program = """
import sys, warnings; warnings.simplefilter("ignore")
import torch
torch.compile = lambda function, **_: function  # torchao compiles the step of its optimizers
from torchao.optim import AdamW8bit
from tieredckpt import CheckpointStore
from tieredckpt.integrations.torch import TrainingState

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 256)
    return model, AdamW8bit(model.parameters())

def step(model, optimizer):
    model(torch.linspace(0, 1, 1024).reshape(4, 256)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

model, optimizer = made(1)
step(model, optimizer)
with CheckpointStore.open({"tiers": {"disk": {"kind": "posix", "path": sys.argv[1]}}}).sync() as store:
    TrainingState(model=model, optimizer=optimizer).save(store, 1)
    other, other_optimizer = made(2)
    assert TrainingState(model=other, optimizer=other_optimizer).restore(store) == 1
moment = next(iter(other_optimizer.state.values()))["exp_avg"]
assert type(moment).__name__ == "OptimState8bit", type(moment)
step(model, optimizer)
step(other, other_optimizer)
assert torch.equal(other.weight, model.weight)
"""
    run(program, str(tmp_path / "disk"))
