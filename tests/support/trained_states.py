"""States of small trainings: a GPT with AdamW in mixed precision, and LoRA adapters on it, on text that Python ships.

Whether their bytes compress is a matter of the values alone, which no random numbers have: so they are trained.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

__all__ = ["GptTraining", "gpt_state", "lora_state"]

_VOCABULARY = 256
_LENGTH = 64
"""Tokens of a text."""
_HEADS = 4
_LAYERS = 2
_RANK = 16
"""Of an adapter."""


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.norms[0](x)).view(batch, length, 3, _HEADS, width // _HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class _Gpt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(_VOCABULARY, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(_LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def _text() -> torch.Tensor:
    files = sorted(Path(random.__file__).parent.glob("*.py"))
    return torch.from_numpy(np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).copy()).long()


def _train(model: nn.Module, steps: int) -> torch.optim.AdamW:
    text = _text()
    torch.set_num_threads(1)  # on a busy machine, several wait for each other
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - _LENGTH - 1, (8,))
        batch = torch.stack([text[start : start + _LENGTH + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            found = model(batch[:, :-1])
        loss = functional.cross_entropy(found.float().reshape(-1, _VOCABULARY), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return optimizer


def _state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """fp32 weights and moments of what is trained, and the 16-bit weights of all."""
    master = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    moments = {name: optimizer.state[each] for name, each in model.named_parameters() if each.requires_grad}
    return {
        "params": {name: each.detach().to(torch.bfloat16) for name, each in model.named_parameters()},
        "master": master,
        "mu": {name: moment["exp_avg"] for name, moment in moments.items()},
        "nu": {name: moment["exp_avg_sq"] for name, moment in moments.items()},
    }


def gpt_state() -> dict[str, Any]:
    """Of 14 bytes per parameter, as after mixed-precision training with AdamW."""
    torch.manual_seed(0)
    model = _Gpt(256)
    return _state(model, _train(model, 100))


class GptTraining:
    """A small GPT in training, whose batches depend on the seed and the step alone."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self._seed = seed
        self._text = _text()
        self._held_back = len(self._text) * 9 // 10
        self.model = _Gpt(128)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            loss = self._loss(self._batch(1_000_000 * self._seed + step, 0, self._held_back))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def validation(self) -> float:
        """The mean loss on text that is not trained on."""
        with torch.no_grad():
            found = [self._loss(self._batch(i, self._held_back, len(self._text))).item() for i in range(20)]
        return float(sum(found)) / len(found)

    def _batch(self, seed: int, begin: int, end: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(seed)
        starts = torch.randint(begin, end - _LENGTH - 1, (8,), generator=chance)
        return torch.stack([self._text[start : start + _LENGTH + 1] for start in starts])

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = self.model(batch[:, :-1])
        return functional.cross_entropy(found.float().reshape(-1, _VOCABULARY), batch[:, 1:].reshape(-1))

    def state(self) -> dict[str, Any]:
        """Weights and moments, by name; the memory of the training itself."""
        named = dict(self.model.named_parameters())
        moments = {name: self.optimizer.state[each] for name, each in named.items()}
        return {
            "master": {name: each.detach() for name, each in named.items()},
            "mu": {name: moment["exp_avg"] for name, moment in moments.items()},
            "nu": {name: moment["exp_avg_sq"] for name, moment in moments.items()},
        }

    def take(self, state: dict[str, Any], like: GptTraining) -> None:
        """Go on with a state, and with the step counts of another training."""
        self.optimizer.load_state_dict(copy.deepcopy(like.optimizer.state_dict()))  # which shares its tensors
        for name, each in self.model.named_parameters():
            each.data.copy_(torch.as_tensor(state["master"][name]))
            self.optimizer.state[each]["exp_avg"] = torch.as_tensor(state["mu"][name]).clone()
            self.optimizer.state[each]["exp_avg_sq"] = torch.as_tensor(state["nu"][name]).clone()


class _Adapted(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(_RANK, inner.in_features) / inner.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(inner.out_features, _RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + functional.linear(functional.linear(x, self.a), self.b)


def lora_state() -> dict[str, Any]:
    """Adapters of a GPT whose own weights are frozen."""
    torch.manual_seed(1)
    model = _Gpt(128)
    for each in model.parameters():
        each.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, _Block)
        block.up, block.down = _Adapted(block.up), _Adapted(block.down)
    state = _state(model, _train(model, 30))
    return {key: state[key] for key in ("master", "mu", "nu")}
