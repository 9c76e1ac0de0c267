"""States on CUDA devices through torch's own code, with ``pytest -m cuda``; `test_cuda_lookalike` needs no device."""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import need_cuda
from support.scenes import config, folder, new_shared_folder, ram

from tieredckpt import CheckpointStore

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.float64]
FORMS = {
    "plain": lambda tensor: tensor,
    "turned": lambda tensor: tensor.mT if tensor.dim() > 1 else tensor,
    "strided": lambda tensor: tensor.repeat_interleave(3, -1)[..., ::3],
    "apart": lambda tensor: torch.cat([tensor.reshape(-1)[:1].repeat(3), tensor.reshape(-1)])[3:].view(tensor.shape),
}
"""Memory layouts that programs have, of the same values."""


@pytest.fixture(autouse=True)
def device() -> None:
    need_cuda()


def of(seed: int, like: Any) -> Any:
    """Random values in the shape and dtype of a tensor, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(like.shape, generator=generator) * 3).to(like.dtype)


def bits(tensor: Any) -> bytes:
    plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    found: bytes = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


@st.composite
def states(draw: Any) -> dict[str, Any]:
    def tensor() -> Any:
        shape = draw(st.sampled_from([(1,), (7,), (1, 1), (3, 5), (300, 70), (2, 90, 110), (40_000,), (0, 4)]))
        device = draw(st.integers(0, torch.cuda.device_count() - 1))
        plain = of(0, torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)))).to(f"cuda:{device}")
        return FORMS[draw(st.sampled_from(sorted(FORMS)))](plain)

    return {f"w{i}": tensor() for i in range(draw(st.integers(1, 9)))}


OPERATIONS = ["copy", "lazy", "copy", "lazy", "change", "change later", "like", "into", "torch", "reopen"]


@settings(max_examples=25)
@given(
    state=states(),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=12),
    past_ram=st.booleans(),
    how=st.fixed_dictionaries({"threads": st.integers(1, 3), "lazy_guard": st.sampled_from(["versions", "digests"])}),
)
def test_a_state_comes_back_whatever_its_layout_is_and_what_is_under_way(
    state: dict[str, Any], operations: list[str], past_ram: bool, how: dict[str, Any]
) -> None:
    memory = new_shared_folder()
    tiers = {"ram": ram(memory), "disk": folder(memory / "disk", retain="all")}
    if past_ram:
        del tiers["ram"]
    saved: dict[int, dict[str, bytes]] = {}
    with ExitStack() as until_end:
        until_end.callback(shutil.rmtree, memory)
        opened = until_end.enter_context(CheckpointStore.open_sync(config(tiers, **how)))
        for seed, operation in enumerate(operations):
            if operation in {"copy", "lazy"}:
                saved[seed] = {key: bits(each) for key, each in state.items()}
                opened.save(seed, state, capture=operation).captured()
            elif operation == "change":
                for each in state.values():
                    each.copy_(of(seed, each))
            elif operation == "change later":
                for each in state.values():
                    each.copy_(of(seed, each).pin_memory(), non_blocking=True)
            elif operation == "reopen":
                opened.close()
                opened = until_end.enter_context(CheckpointStore.open_sync(config(tiers, **how)))
            elif saved:
                way: Any = {"as_": "torch"} if operation == "torch" else {operation: state}
                restored = opened.restore(**way)
                assert restored is not None
                assert restored.step == max(saved)
                found = state if operation == "into" else restored.tree
                assert {key: bits(each) for key, each in found.items()} == saved[restored.step]


def test_a_graph_that_is_captured_beside_saves_and_restores_is_not_ended(tmp_path: Path, shared_memory: Path) -> None:
    """A call of another thread that CUDA calls unsafe ends the capture, and with it the training."""
    state = {f"w{i}": torch.randn(1 << 16, device="cuda") for i in range(9)} | {
        "b": torch.randn(70, 90, device="cuda").T
    }
    failed: list[BaseException] = []
    ends = threading.Event()

    def save() -> None:
        try:
            for step in range(1, 40):
                store.save(step, state, capture="lazy" if step % 2 else "copy").captured()
                if step % 4 == 0:
                    store.restore(into=state)
        except BaseException as error:
            failed.append(error)
        finally:
            ends.set()

    with CheckpointStore.open_sync(config({"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")})) as store:
        side, scale = torch.cuda.Stream(), torch.ones(1000, device="cuda")
        thread = threading.Thread(target=save)
        thread.start()
        try:
            while not ends.is_set():
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                with torch.cuda.stream(side):
                    graph.capture_begin(capture_error_mode="global")
                    scale.mul_(1)
                    ends.wait(0.005)
                    graph.capture_end()
        finally:
            thread.join()
    assert not failed


def test_a_device_without_free_memory_is_saved(tmp_path: Path, shared_memory: Path) -> None:
    state = {
        "turned": torch.randn(150, 170, device="cuda").T,
        "strided": torch.randn(90, 160, device="cuda")[::3, ::2],
        "conjugate": torch.randn(1 << 15, dtype=torch.complex64, device="cuda").conj(),
        "plain": torch.randn(1 << 19, device="cuda"),
    } | {f"w{i}": torch.randn(100 + i, device="cuda") for i in range(30)}
    expected = {key: bits(each.resolve_conj()) for key, each in state.items()}
    torch.cuda.empty_cache()
    taken = []
    for size in (1 << 30, 1 << 26, 1 << 20, 512):
        try:
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            continue
    try:
        tiers = {"ram": ram(shared_memory, capacity="64 MiB"), "disk": folder(tmp_path / "disk")}
        with CheckpointStore.open_sync(config(tiers)) as store:
            for step, capture in enumerate(("copy", "lazy", "copy"), start=1):
                store.save(step, state, capture=capture).captured()
            restored = store.restore(as_="torch")
            assert restored is not None
            assert {key: bits(each) for key, each in restored.tree.items()} == expected
    finally:
        taken.clear()
        torch.cuda.empty_cache()
