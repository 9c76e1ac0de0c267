"""The step of a torch optimizer waits until a lazy save has its copy, and goes on whatever becomes of that save."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.devices import need_cuda
from support.lazy_saves import SIZE
from support.scenes import SOON

from tieredckpt import CheckpointStore, Invalid
from tieredckpt.config import StoreConfig
from tieredckpt.engine.saving import lazy


def about_to_step(**options: Any) -> tuple[Any, Any]:
    """A parameter that has a gradient, and an optimizer of it."""
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    parameter.grad = torch.ones(SIZE)
    return parameter, torch.optim.SGD([parameter], lr=1, **options)


@contextmanager
def waiting_for(held_back: threading.Event) -> Iterator[None]:
    """Release the copy after a moment, and assert that the call in the block has waited for that."""
    timer = threading.Timer(0.05, held_back.set)
    timer.start()
    yield
    assert held_back.is_set()
    timer.join()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("how", ["Adam", "foreach", "fused", "fused SGD"])
def test_the_step_of_a_torch_optimizer_waits_for_the_copy(
    how: str, where: str, tiers: StoreConfig, held_back: threading.Event
) -> None:
    """Fused steps change parameters without counting that."""
    torch = pytest.importorskip("torch")
    if where == "cuda":
        need_cuda()
    parameter = torch.nn.Parameter(torch.ones(SIZE, device=where))
    options: dict[str, Any] = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "fused SGD": {"fused": True},
    }.get(how, {})
    optimizer = (torch.optim.SGD if "SGD" in how else torch.optim.Adam)([parameter], lr=0.5, **options)
    with CheckpointStore.open(tiers).sync() as store:
        for step in range(1, 4):
            held_back.clear()
            before = parameter.detach().clone()
            checkpoint = store.save(step, {"p": parameter, "o": optimizer.state_dict()["state"]}, capture="lazy")
            parameter.grad = torch.ones(SIZE, device=where)
            with waiting_for(held_back):
                optimizer.step()
            assert not torch.equal(parameter, before)
            checkpoint.reached("disk")
            restored = store.restore(as_="torch")
            assert restored is not None
            assert torch.equal(restored.tree["p"], before.cpu())


def test_a_step_goes_on_whatever_else_is_called_before_it(tiers: StoreConfig) -> None:
    """torch walks over its hooks while it calls them: none may go meanwhile."""
    parameter, optimizer = about_to_step()
    register = importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook
    calls: list[int] = []
    with CheckpointStore.open(tiers).sync() as store:
        checkpoint = store.save(1, {"p": parameter}, capture="lazy")
        another = register(lambda *_: calls.append(1))
        try:
            optimizer.step()
            store.save(2, {"p": parameter}, capture="lazy")
            optimizer.step()
        finally:
            another.remove()
        assert calls == [1, 1]
        checkpoint.reached("disk")
        store.flush()
        assert store.all_steps() == (1, 2)


def test_a_step_while_another_thread_confirms_comes_after_the_copy_and_does_not_fail_it(
    tiers: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a warning of preemption, or a task that awaits `reached`, comes beside the training."""
    parameter, optimizer = about_to_step()
    compares, stepped = threading.Event(), threading.Event()
    is_unchanged, trainer = lazy._is_unchanged, threading.get_ident()

    def late(*arguments: Any) -> bool:
        if threading.get_ident() != trainer:
            compares.set()
            assert stepped.wait(SOON)
        return is_unchanged(*arguments)

    monkeypatch.setattr(lazy, "_is_unchanged", late)
    with CheckpointStore.open(tiers).sync() as store:
        checkpoint = store.save(1, {"p": parameter}, capture="lazy")
        beside = threading.Thread(target=checkpoint.captured)
        beside.start()
        assert compares.wait(SOON)
        optimizer.step()
        stepped.set()
        beside.join()
        checkpoint.reached("ram")
        restored = store.restore(1)
        assert restored is not None
        assert (restored.tree["p"] == 1).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch compiles with
def test_a_compiled_step_waits_for_the_copy(tiers: StoreConfig, held_back: threading.Event) -> None:
    torch = pytest.importorskip("torch")
    parameter, optimizer = about_to_step()

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    step()
    with CheckpointStore.open(tiers).sync() as store:
        for number in range(1, 4):
            held_back.clear()
            before = parameter.detach().clone()
            checkpoint = store.save(number, {"p": parameter}, capture="lazy")
            with waiting_for(held_back):
                step()
            checkpoint.reached("ram")
            step()
            restored = store.restore(number, as_="torch")
            assert restored is not None
            assert torch.equal(restored.tree["p"], before)


def test_a_step_after_a_failed_lazy_save_does_not_raise(tiers: StoreConfig, held_back: threading.Event) -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    with CheckpointStore.open(tiers).sync() as store:
        checkpoint = store.save(1, {"p": parameter}, capture="lazy")
        with torch.no_grad():
            parameter.add_(1)
        held_back.set()
        parameter.grad = torch.ones(SIZE)
        optimizer.step()
        with pytest.raises(Invalid, match="'p'"):
            checkpoint.reached("ram")
        assert store.all_steps() == ()


def test_the_step_of_a_torch_optimizer_waits_for_the_copy_also_while_the_store_is_closed(
    tiers: StoreConfig, held_back: threading.Event
) -> None:
    parameter, optimizer = about_to_step(fused=True)
    store = CheckpointStore.open(tiers).sync().__enter__()
    store.save(1, {"w": parameter}, capture="lazy")
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._life.loop.thread.closing:
        time.sleep(0.001)
    with waiting_for(held_back):
        optimizer.step()
    closing.join()
    with CheckpointStore.open(tiers).sync() as store:
        restored = store.restore(1)
        assert restored is not None
        assert (restored.tree["w"] == 1).all()
