"""Objects of torch and torchao in processes of their own: without torch, and with a library that warns at import."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tieredckpt.format.structure import encode_structure  # noqa: E402
from tieredckpt.tree import flatten  # noqa: E402


def test_without_torch_their_plain_parts_come_back() -> None:
    structure = encode_structure(flatten({"d": torch.float16, "s": torch.Size([2, 3])}).structure)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from tieredckpt.format.structure import decode_structure\n"
        "from tieredckpt.tree import unflatten\n"
        f"assert unflatten(decode_structure({structure!r}), {{}}) == {{'d': 'torch.float16', 's': (2, 3)}}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_quantized_weights_and_moments_of_torchao_come_back() -> None:
    pytest.importorskip("torchao")
    program = """
import warnings; warnings.simplefilter("ignore")
import torch
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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
