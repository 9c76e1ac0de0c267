"""Optimizers whose state no step without the training's own can make, or has another form after each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tieredckpt import Invalid, SyncStore
from tieredckpt.integrations.torch import TrainingState


class Sharpness(torch.optim.SGD):
    """As SAM and others that ask for their closure when they are called without it."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        return super().step(closure)


class Counted(torch.optim.Optimizer):
    """As DLRM's RWSAdagrad: it makes a part of its state when it is made, and the rest in its first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            self.state.update((param, {"step": 0}) for param in group["params"])

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            state.setdefault("sum", torch.zeros_like(param)).addcmul_(param.grad, param.grad)
            param.data.addcdiv_(param.grad, state["sum"].sqrt() + 1e-9, value=-0.1)
        return loss


class CountedAlone(Counted):
    """The same without a closure, so that torch can make the whole state."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure or (lambda: None))


class Bare(torch.optim.Optimizer):
    """The state of a parameter is one tensor, and no dict; of a vector it is one number, of a single number an int."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for param in self.param_groups[0]["params"]:
            if param.numel() == 1:
                self.state[param] = self.state.get(param, 0) + 1
            else:
                former = self.state.get(param, torch.zeros_like(param if param.ndim > 1 else param[0]))
                self.state[param] = former + (param.grad if param.ndim > 1 else param.grad.sum())
            param.data.sub_(param.grad + self.state[param], alpha=0.01)
        return loss


def made(kind: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4, sparse=kind == "SparseAdam"))
    if kind != "SparseAdam":
        model.extend([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)] if kind == "Bare" else [torch.nn.Linear(4, 1)])
    if kind == "Sharpness":
        return model, Sharpness(model.parameters(), lr=0.1, momentum=0.9)
    own = {"Counted": Counted, "CountedAlone": CountedAlone, "Bare": Bare}
    if kind in own:
        return model, own[kind](model.parameters(), lr=0.1)
    options = {"history_size": 3, "max_iter": 2} if kind == "LBFGS" else {}
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train(model: Any, optimizer: Any, steps: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(torch.arange(6)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam", "Sharpness", "Counted", "CountedAlone", "Bare"])
@pytest.mark.parametrize("used", [0, 1, 5])
def test_an_optimizer_that_needs_the_trainings_own_step_goes_on_bit_for_bit(
    opened: SyncStore, kind: str, used: int
) -> None:
    model, optimizer = made(kind, 1)
    train(model, optimizer, 3)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    other, other_optimizer = made(kind, 2)
    train(other, other_optimizer, used)
    other_optimizer.param_groups[0]["lr"] = 0.2
    assert TrainingState(model=other, optimizer=other_optimizer).restore(opened) == 1
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for each in ((model, optimizer), (other, other_optimizer)):
        train(*each, 3)
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_a_restore_that_fails_leaves_the_settings_of_such_an_optimizer(opened: SyncStore) -> None:
    model, optimizer = made("SparseAdam", 1)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    model, optimizer = made("Sharpness", 1)
    with pytest.raises(Invalid, match="does not fit step 1"):
        TrainingState(model=model, optimizer=optimizer).restore(opened)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(parameter.grad is None for parameter in model.parameters())


def grouped(groups: list[list[int]], rates: list[float], momentum: float = 0.9) -> tuple[Any, Any]:
    """A model, and its optimizer, of which each group has the layers with these numbers."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    layers = [{"params": [p for i in each for p in model[i].parameters()]} for each in groups]
    options = [{**each, "lr": rate} for each, rate in zip(layers, rates, strict=True)]
    return model, torch.optim.SGD(options, momentum=momentum)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_groups_of_parameters_get_their_own_settings_in_whatever_order_they_are(
    opened: SyncStore, momentum: float
) -> None:
    """Promise 4. Without momentum SGD has no state by which torch would know the parameters."""
    model, optimizer = grouped([[0], [1, 2]], [0.1, 0.5], momentum)
    train(model, optimizer, 1)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    model, optimizer = grouped([[2, 1], [0]], [0, 0], momentum)
    TrainingState(model=model, optimizer=optimizer).restore(opened)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ([[0, 1, 2]], [[0], [1, 2]]),
        ([[0], [1, 2]], [[0, 1, 2]]),
        ([[0], [1, 2]], [[0, 1], [2]]),
        ([[0]], [[0], [1, 2]]),
        ([[0], [1, 2]], [[0]]),
        ([[0, 1, 2]], [[0, 1, 2], []]),
    ],
)
def test_other_groups_than_the_saved_ones_are_refused_and_not_found_by_the_next_step(
    opened: SyncStore, saved: list[list[int]], live: list[list[int]], trained: int
) -> None:
    """Promise 4: a group had no settings then, or those of another."""
    model, optimizer = grouped(saved, [0.1, 0.5][: len(saved)])
    train(model, optimizer, trained)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    model, optimizer = grouped(live, [0.2, 0.3][: len(live)])
    with pytest.raises(Invalid, match=r"'optimizer': its parameters are in other groups|only in the step: 'optimizer/"):
        TrainingState(model=model, optimizer=optimizer).restore(opened)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3][: len(live)]


@pytest.mark.usefixtures("one_rank")
def test_such_an_optimizer_of_shards_is_restored_once_it_has_a_state_of_its_own(opened: SyncStore) -> None:
    """Whole tensors, as they would come in the form in which they were saved, do not fit shards."""
    from torch.distributed.fsdp import fully_shard

    def sharded(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = fully_shard(torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 1)))
        return model, Sharpness(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = sharded(1)
    train(model, optimizer, 3)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    other, other_optimizer = sharded(2)
    with pytest.raises(
        Invalid, match=r"(?s)part 'optimizer' could not be given its state: needs a closure.*make a step"
    ):
        TrainingState(model=other, optimizer=other_optimizer).restore(opened)
    train(other, other_optimizer, 1)
    TrainingState(model=other, optimizer=other_optimizer).restore(opened)
    for each in ((model, optimizer), (other, other_optimizer)):
        train(*each, 3)
    assert torch.equal(other[0].weight.full_tensor(), model[0].weight.full_tensor())


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("frozen_when_saved", [True, False])
def test_the_state_of_parameters_that_are_frozen_comes_back(
    opened: SyncStore, used: int, frozen_when_saved: bool
) -> None:
    """Promise 4. torch makes no state for them, and drops the one that it is given."""
    model, optimizer = grouped([[0, 1, 2]], [0.1])
    train(model, optimizer, 2)
    model[0].requires_grad_(not frozen_when_saved)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    other, other_optimizer = grouped([[0, 1, 2]], [0.1])
    train(other, other_optimizer, used)
    other[0].requires_grad_(False)
    TrainingState(model=other, optimizer=other_optimizer).restore(opened)
    assert not other[0].weight.requires_grad
    for each in ((model, optimizer), (other, other_optimizer)):
        each[0].requires_grad_(True)
        train(*each, 1)
    assert torch.equal(other[0].weight, model[0].weight)


def test_an_optimizer_that_has_the_state_of_fewer_parameters_gets_those_of_the_step(opened: SyncStore) -> None:
    model, optimizer = grouped([[0, 1, 2]], [0.1])
    state = TrainingState(model=model, optimizer=optimizer)
    model[0].requires_grad_(False)
    train(model, optimizer, 1)
    state.save(opened, 1)
    model[0].requires_grad_(True)
    train(model, optimizer, 1)
    state.save(opened, 2)
    momentum = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    state.restore(opened, 1, resume=False)
    assert model[0].weight not in optimizer.state
    state.restore(opened)
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], momentum)


def test_frozen_parameters_that_cannot_train_keep_no_step_from_being_restored(opened: SyncStore) -> None:
    """A quantized base has integers, for which Adagrad makes a state as for all others."""

    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(2, 2)
            self.base = torch.nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)

    def made() -> tuple[Quantized, torch.optim.Optimizer]:
        model = Quantized()
        return model, torch.optim.Adagrad(model.parameters())

    model, optimizer = made()
    model.a(torch.ones(2)).sum().backward()
    optimizer.step()
    model.a.requires_grad_(False)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    other, another = made()
    other.a.requires_grad_(False)
    TrainingState(model=other, optimizer=another).restore(opened)
    assert [parameter.requires_grad for parameter in other.parameters()] == [False] * 3
    assert torch.equal(another.state[other.a.weight]["sum"], optimizer.state[model.a.weight]["sum"])


def test_a_restore_that_is_refused_leaves_an_optimizer_the_state_that_it_has(opened: SyncStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def trained(*layers: int) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        for layer in layers:
            model[layer](torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return optimizer

    parts = {"model": model, "optimizer": trained(0, 1)}
    TrainingState(**parts, more=torch.nn.Linear(1, 1)).save(opened, 1)
    optimizer = trained(0)
    before = {key: state["exp_avg"].clone() for key, state in optimizer.state.items()}
    with pytest.raises(Invalid, match="more"):
        TrainingState(model=model, optimizer=optimizer).restore(opened)
    assert optimizer.state.keys() == before.keys()
    for key, state in optimizer.state.items():
        assert torch.equal(state["exp_avg"], before[key])


def test_the_parts_of_a_rank_are_compared_before_anything_is_loaded(opened: SyncStore) -> None:
    class Position:
        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError("it is loaded")

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = other.weight.detach().clone()
    TrainingState(model=model, per_rank=["first"], first=Position()).save(opened, 1)
    with pytest.raises(Invalid, match="missing from the step: 'ranks/0/second'"):
        TrainingState(model=other, per_rank=["second"], second=Position()).restore(opened)
    assert torch.equal(other.weight, before)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")  # which torch uses itself
def test_an_optimizer_that_gathers_its_state_on_one_rank_is_refused_when_the_state_is_made() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
    with pytest.raises(Invalid, match=r"part 'optimizer': a ZeroRedundancyOptimizer gathers .*FSDP2"):
        TrainingState(model=model, optimizer=optimizer)
