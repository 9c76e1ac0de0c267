"""Modules whose state is more than their tensors: quantized layers, and extra states that change."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tieredckpt import Invalid, SyncStore
from tieredckpt.integrations import _module_state
from tieredckpt.integrations.torch import TrainingState


class Linear4bit(torch.nn.Linear):
    """As bitsandbytes has it: tells the state of the quantization below its weight, and does not take it."""

    def __init__(self, scale: float) -> None:
        super().__init__(4, 4)
        packed = torch.arange(8, dtype=torch.uint8)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.absmax, self.scale = torch.full((2,), scale), scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax
        packed = torch.tensor([self.scale])  # is made anew for each call
        destination[f"{prefix}weight.quant_state.bitsandbytes__nf4"] = packed

    def forward(self, x: Any) -> Any:
        return x * self.absmax.sum()


class Linear8bit(torch.nn.Linear):
    """As bitsandbytes has it: its scales are in its state and not among its attributes, and it takes them."""

    def __init__(self, scale: float) -> None:
        super().__init__(4, 4)
        self.weight = torch.nn.Parameter(torch.arange(16, dtype=torch.int8).reshape(4, 4), requires_grad=False)
        self.weight.SCB = torch.full((4,), scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}SCB"] = self.weight.SCB
        destination[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        state.pop(f"{prefix}weight_format")
        super()._load_from_state_dict(state, prefix, *others)
        self.weight.SCB.copy_(state[f"{prefix}SCB"])
        others[3].remove(f"{prefix}SCB")  # of the unexpected keys

    def forward(self, x: Any) -> Any:
        return x * self.weight.SCB


def finetuned(base: Any) -> tuple[Any, Any]:
    """A frozen base, as QLoRA has it, and an adapter that is trained."""
    model = torch.nn.ModuleDict({"base": base, "adapter": torch.nn.Linear(4, 1)})
    for parameter in base.parameters():
        parameter.requires_grad_(False)
    return model, torch.optim.AdamW(model["adapter"].parameters())


def train(model: Any, optimizer: Any) -> None:
    model["adapter"](model["base"](torch.ones(2, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("base", [Linear4bit, Linear8bit])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_adapter_on_a_quantized_model_goes_on(opened: SyncStore, base: Any, compiled: bool) -> None:
    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model, optimizer = finetuned(base(0.5))
        if compiled:
            model["base"] = torch.compile(model["base"], backend="eager")
        return model, optimizer

    model, optimizer = made(1)
    train(model, optimizer)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    assert "model/base.weight" in {array.key for array in opened.describe(1).arrays}
    other, other_optimizer = made(2)
    assert TrainingState(model=other, optimizer=other_optimizer).restore(opened) == 1
    for each in ((model, optimizer), (other, other_optimizer)):
        train(*each)
    assert torch.equal(other["adapter"].weight, model["adapter"].weight)


def test_what_a_module_does_not_take_must_be_what_it_has(opened: SyncStore) -> None:
    model, _ = finetuned(Linear4bit(0.5))
    TrainingState(model=model).save(opened, 1)
    other, _ = finetuned(Linear4bit(0.25))
    with pytest.raises(Invalid, match=r"part 'model': .* for 'base\.weight\.quant_state\.bitsandbytes__nf4'"):
        TrainingState(model=other).restore(opened)


class Silent(torch.nn.Linear):
    """Tells nothing of its bias, and takes it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}bias"]


def test_what_a_module_wants_and_does_not_tell_is_named(opened: SyncStore) -> None:
    TrainingState(model=torch.nn.Sequential(Silent(2, 2))).save(opened, 1)
    with pytest.raises(Invalid, match=r"part 'model': the module wants '0\.bias'"):
        TrainingState(model=torch.nn.Sequential(Silent(2, 2))).restore(opened)


class Quiet(torch.nn.Linear):
    """Says nothing of how its loading went, as its own `load_state_dict` may."""

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        super().load_state_dict(*arguments, **options)


def test_a_module_that_says_nothing_of_its_loading_is_restored(opened: SyncStore) -> None:
    model, other = Quiet(2, 2), Quiet(2, 2)
    TrainingState(model=model).save(opened, 1)
    TrainingState(model=other).restore(opened)
    assert torch.equal(other.weight, model.weight)


def test_fsdp1_is_refused_and_pointed_to_fsdp2(opened: SyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs an accelerator, so that another class takes its place."""
    monkeypatch.setattr(_module_state, "FullyShardedDataParallel", torch.nn.Bilinear)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2))
    with pytest.raises(Invalid, match=r"FSDP1.*fully_shard"):
        TrainingState(model=model).save(opened, 1)


class History(torch.nn.Linear):
    """With an extra state that grows, as the scales of low-precision layers do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[Any] = []
        self.amax = torch.zeros(0)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "amax": self.amax}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.amax = state["seen"], state["amax"]


def test_an_extra_state_comes_back_in_the_form_in_which_it_was_saved(opened: SyncStore) -> None:
    model = torch.nn.Sequential(History())
    model[0].seen, model[0].amax = [1, {"recipe": "tensorwise"}], torch.arange(3.0)
    TrainingState(model=model).save(opened, 1)
    other = torch.nn.Sequential(History())
    assert TrainingState(model=other).restore(opened) == 1
    assert other[0].seen == model[0].seen
    assert torch.equal(other[0].amax, model[0].amax)
    assert torch.equal(other[0].weight, model[0].weight)
