"""A PyTorch training that is killed goes on bit for bit, whatever its parts are."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import SOON, launch
from reliability.tiers import FaultyTiers
from support.scenes import config, folder, ram

torch = pytest.importorskip("torch")

from integrations.torch_program import Augmented, buffers_of, model_of_ranks, store_in, trained, weights_of

from tieredckpt import CheckpointStore, Invalid, NotFound, SyncStore, TierUnavailable
from tieredckpt.integrations._rng import rng_state, set_rng_state
from tieredckpt.integrations.torch import TrainingState

PROGRAM = Path(__file__).with_name("torch_program.py")


def model_of(seed: int, *, width: int = 8) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))


def train(model: Any, *optimizers: Any, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.linspace(-1, 1, 20).reshape(5, 4) * (step + 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def bits(*parts: Any) -> list[bytes]:
    """Of every tensor in some state dicts, in their order."""
    found: list[bytes] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.append(part.detach().numpy().tobytes())
        elif isinstance(part, (dict, list, tuple)):
            found += bits(*(part.values() if isinstance(part, dict) else part))
        elif hasattr(part, "state_dict"):
            found += bits(part.state_dict())
    return found


# -- killed -----------------------------------------------------------------------------------------------


def test_a_training_killed_in_the_middle_goes_on_bit_for_bit(shared_memory: Path) -> None:
    pytest.importorskip("torchdata")

    command = [sys.executable, str(PROGRAM)]
    dying = [
        subprocess.Popen([*command, str(shared_memory), plain], stderr=subprocess.PIPE, text=True)
        for plain in ("", "plain")
    ]
    through = [trained(shared_memory / f"through-{plain}", plain=plain) for plain in (False, True)]
    for each in dying:
        with each:
            _, problem = each.communicate(timeout=SOON)
            assert each.returncode == -signal.SIGKILL, problem
    assert [trained(shared_memory / f"killed-{plain}", plain=plain) for plain in (False, True)] == through


@pytest.mark.timeout(4 * SOON)
def test_ranks_of_fsdp_tp_and_ddp_go_on_bit_for_bit_and_those_of_fsdp_after_sigkill(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    for task in ("die", "resume"):
        arguments = {"task": task, "folder": str(shared_memory)}
        with launch("torch", PROGRAM, ranks=2, folder=tmp_path / task, arguments=arguments) as job:
            status = job.wait()
            assert (status == 0) == (task == "resume"), job.output
            told.append([job.told(rank) for rank in range(2)])
    for kind in ("fsdp", "tp", "ddp"):
        for told_through, told_resumed in zip(*told, strict=True):
            assert told_through[kind]["digest"] == told_resumed[kind]["digest"]
    assert told[0][0]["fsdp"]["digest"] != told[0][1]["fsdp"]["digest"]
    # Every rank was given the buffers of the first, and had others in the end.
    for kind in ("fsdp", "ddp"):
        assert told[1][0][kind]["restored"] == told[1][1][kind]["restored"] != told[0][0][kind]["restored"]
    assert told[1][0]["ddp"]["buffers"] != told[1][1]["ddp"]["buffers"]
    # Any number of ranks takes the weights; the generators of two are not those of one.
    model = model_of_ranks(3)
    noise = torch.get_rng_state()
    caplog.clear()
    with store_in(shared_memory / "killed") as store:
        assert TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters()), epoch=0).restore(store)
    assert weights_of(model) == told[0][0]["fsdp"]["weights"]
    assert torch.equal(torch.get_rng_state(), noise)
    assert "step 13 was saved by 2 ranks, and these are 1" in caplog.text
    model = model_of_ranks(3, norm=True)
    with store_in(shared_memory / "ddp") as store:
        assert TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters()), epoch=0).restore(store)
    assert (weights_of(model), buffers_of(model)) == tuple(told[0][0]["ddp"][name] for name in ("weights", "buffers"))


# -- what may be otherwise in the next process ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "RMSprop"])
def test_a_fresh_optimizer_takes_what_was_saved(opened: SyncStore, kind: str) -> None:
    def made(seed: int) -> tuple[Any, Any]:
        model = model_of(seed)
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    model, optimizer = made(1)
    train(model, optimizer)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    fresh, fresh_optimizer = made(2)
    pointers = [weight.data_ptr() for weight in fresh.parameters()]
    assert TrainingState(model=fresh, optimizer=fresh_optimizer).restore(opened) == 1
    assert bits(fresh, fresh_optimizer) == bits(model, optimizer)
    assert [weight.data_ptr() for weight in fresh.parameters()] == pointers
    train(model, optimizer)
    train(fresh, fresh_optimizer)
    assert bits(fresh, fresh_optimizer) == bits(model, optimizer)


def test_settings_of_an_optimizer_may_be_others_than_the_saved_ones(opened: SyncStore) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1)
    train(model, optimizer)
    del optimizer.param_groups[0]["maximize"]  # as of a version of torch that had no such setting
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    fresh = model_of(2)
    fused = torch.optim.AdamW(fresh.parameters(), lr=0.5, foreach=True)
    assert TrainingState(model=fresh, optimizer=fused).restore(opened) == 1
    assert bits(fresh, fused) == bits(model, optimizer)
    assert fused.param_groups[0]["lr"] == 1


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_save_before_the_first_step_changes_nothing_and_restores_an_optimizer_without_state(
    opened: SyncStore, kind: str
) -> None:
    def made(seed: int) -> tuple[Any, Any, Any]:
        model = model_of(seed)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, optimizer, scheduler = made(1)
    twin, twins_optimizer, _ = made(1)
    TrainingState(model=model, optimizer=optimizer, scheduler=scheduler).save(opened, 0)
    assert not optimizer.state
    used, used_optimizer, used_scheduler = made(2)
    train(used, used_optimizer)
    assert TrainingState(model=used, optimizer=used_optimizer, scheduler=used_scheduler).restore(opened) == 0
    for each in (optimizer, twins_optimizer, used_optimizer):
        train({optimizer: model, twins_optimizer: twin, used_optimizer: used}[each], each)
    assert bits(model, optimizer) == bits(twin, twins_optimizer) == bits(used, used_optimizer)


def test_parameters_that_never_had_a_gradient_have_no_state_afterwards_either(opened: SyncStore) -> None:
    def made(seed: int) -> tuple[Any, Any, Any]:
        model = torch.nn.ModuleDict({"used": model_of(seed), "spare": torch.nn.Linear(2, 2)})
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, TrainingState(model=model, optimizer=optimizer)

    model, optimizer, state = made(1)
    train(model["used"], optimizer)
    state.save(opened, 1)
    other, other_optimizer, other_state = made(2)
    other_state.restore(opened)
    assert bits(other, other_optimizer) == bits(model, optimizer)
    assert len(other_optimizer.state) == len(optimizer.state) == 6


def test_tied_weights_stay_tied(opened: SyncStore) -> None:
    def made(seed: int) -> tuple[Any, Any, Any]:
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
        torch.nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(seed))
        model[1].weight = model[0].weight
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, TrainingState(model=model, optimizer=optimizer)

    def steps(model: Any, optimizer: Any) -> None:
        for _ in range(2):
            model(torch.arange(9)).square().mean().backward()
            optimizer.step()

    model, optimizer, state = made(1)
    steps(model, optimizer)
    state.save(opened, 1)
    other, other_optimizer, other_state = made(2)
    other_state.restore(opened)
    assert other[1].weight is other[0].weight
    optimizer.zero_grad()
    steps(model, optimizer)
    steps(other, other_optimizer)
    assert bits(other, other_optimizer) == bits(model, optimizer)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_goes_on_as_a_plain_one_and_back(opened: SyncStore, *, compiled_first: bool) -> None:
    def made(seed: int, *, compiled: bool) -> tuple[Any, Any]:
        model = model_of(seed)
        optimizer = torch.optim.Adam(model.parameters())
        return torch.compile(model, backend="eager") if compiled else model, optimizer

    model, optimizer = made(1, compiled=compiled_first)
    train(model, optimizer)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    assert not any("_orig_mod" in array.key for array in opened.describe(1).arrays)
    other, other_optimizer = made(2, compiled=not compiled_first)
    TrainingState(model=other, optimizer=other_optimizer).restore(opened)
    assert bits(other, other_optimizer) == bits(model, optimizer)


def test_modules_optimizers_and_values_of_any_number_and_name(opened: SyncStore) -> None:
    def made(seed: int) -> tuple[TrainingState, list[Any]]:
        generator, judge = model_of(seed), model_of(seed + 1, width=6)
        parts = {
            "generator": generator,
            "judge": judge,
            "average": torch.optim.swa_utils.AveragedModel(generator),
            "loss": torch.nn.MSELoss(),
            "first": torch.optim.Adam(generator.parameters()),
            "second": torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
        }
        return TrainingState(**parts, seen={"a"}, best=0.0, rng=False), list(parts.values())

    state, parts = made(1)
    train(parts[0], parts[4])
    train(parts[1], parts[5])
    parts[2].update_parameters(parts[0])
    state["best"] = 0.5
    state["seen"].add((1, "b"))
    state.save(opened, 3, metrics={"loss": 1.0})
    other, other_parts = made(5)
    assert other.restore(opened) == 3
    assert bits(*other_parts) == bits(*parts)
    assert other_parts[6].get_scale() == 2.0
    assert (other["best"], other["seen"]) == (0.5, {"a", (1, "b")})


async def test_the_async_face_does_the_same(shared_memory: Path, tmp_path: Path) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    model = model_of(1)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    async with CheckpointStore.open(config(tiers)) as store:
        assert await state.restore(store) is None
        train(model, optimizer)
        await (await state.save(store, 1)).reached("disk")
        expected = bits(model, optimizer)
        noise = torch.rand(3)
        train(model, optimizer)
        assert await state.restore(store, 1, resume=True) == 1
        assert bits(model, optimizer) == expected
        assert torch.equal(torch.rand(3), noise)


# -- what a store promises --------------------------------------------------------------------------------


def test_a_step_keeps_its_bytes_while_training_goes_on(opened: SyncStore) -> None:
    model = model_of(1)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    told = {}
    for step in (1, 2):
        train(model, optimizer)
        state.save(opened, step)
        told[step] = bits(model, optimizer)
        train(model, optimizer)  # over the memory that was saved
    assert told[1] != told[2]
    for step in (2, 1):
        tensors = [*model.parameters(), *(moments["exp_avg"] for moments in optimizer.state.values())]
        places = [tensor.data_ptr() for tensor in tensors]
        assert state.restore(opened, step, resume=False) == step
        assert bits(model, optimizer) == told[step]
        tensors = [*model.parameters(), *(moments["exp_avg"] for moments in optimizer.state.values())]
        assert [tensor.data_ptr() for tensor in tensors] == places  # without a second copy of the state


def test_a_failing_tier_ends_no_training(shared_memory: Path, tmp_path: Path, faults: FaultyTiers) -> None:
    tiers = {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk")}
    model = model_of(1)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointStore.open(config(tiers)).sync() as store:
        faults["disk"].fail("put", TierUnavailable("no answer"), times=None)
        for step in (1, 2, 3):
            train(model, optimizer)
            state.save(store, step)
        expected = bits(model, optimizer)
        train(model, optimizer)
        assert state.restore(store) == 3
        assert bits(model, optimizer) == expected
        faults["disk"].revive()


# -- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # which torchdata uses
def test_a_worker_process_draws_after_a_restore_as_it_would_have_drawn(opened: SyncStore) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    # Spawned: a fork of this process, in which tests of JAX may have run, is one of many threads.
    how = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "spawn"}
    loader = stateful(Augmented(), **how)
    batches = iter(loader)
    next(batches)
    TrainingState(dataloader=loader).save(opened, 1)
    expected = list(batches)
    again = stateful(Augmented(), **how)
    torch.manual_seed(5)
    TrainingState(dataloader=again).restore(opened)
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


def test_what_does_not_fit_is_named(opened: SyncStore) -> None:
    model = model_of(1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    TrainingState(model=model, optimizer=optimizer).save(opened, 1)
    for other, why in [
        (TrainingState(model=model_of(1, width=9), rng=False), "'model/0.weight'"),
        (TrainingState(model=model), "only in the step: 'optimizer/"),
        (TrainingState(model=model, optimizer=optimizer, scaler={}), "missing from the step: 'scaler'"),
        (TrainingState(model=model, optimizer=torch.optim.Adam(model[0].parameters())), "'optimizer/"),
    ]:
        with pytest.raises(Invalid, match=f"{why}.* Here `(into|like)` is the parts of the TrainingState"):
            other.restore(opened)
    opened.save(2, {"model": model.state_dict()})
    with pytest.raises(NotFound, match="step 2 was not saved by a TrainingState; restore it with as_='saved'"):
        TrainingState(model=model).restore(opened)
    with pytest.raises(Invalid, match=r"part 'optimizer': no module .* one that holds them"):
        TrainingState(one=model[0], two=model[2], optimizer=optimizer)


def test_rank_0_alone_warns_of_generators_that_were_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (1, 0):
        assert "rng=False" not in caplog.text
        TrainingState()._check_parts_of_rank(3, rank, {})
    assert "step 3 was saved with rng=False" in caplog.text


def generators(count: int, monkeypatch: pytest.MonkeyPatch, current: int = 0) -> Any:
    """Those of so many CUDA devices; a row each."""
    states = torch.randint(0, 256, (count, 16), dtype=torch.uint8)

    def of(index: int | None = None) -> Any:
        return states[current if index is None else index]

    for name, function in (
        ("is_available", lambda: True),
        ("is_initialized", lambda: True),
        ("device_count", lambda: count),
        ("get_rng_state", lambda: of().clone()),
        ("get_rng_state_all", lambda: [each.clone() for each in states]),
        ("set_rng_state", lambda state, index=None: of(index).copy_(state)),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    return states


def test_the_generators_of_all_devices_of_a_process_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout in a layer on the second one draws from its own."""
    saved = generators(4, monkeypatch, current=2).clone()
    state = rng_state()
    others = generators(4, monkeypatch, current=2)
    assert not torch.equal(others, saved)
    set_rng_state(state)
    assert torch.equal(others, saved)
    alone = generators(1, monkeypatch)  # a process that sees its own device only
    set_rng_state(state)
    assert torch.equal(alone, saved[2:3])
    state = rng_state()
    two = generators(2, monkeypatch, current=1)
    expected = torch.stack([two[0], saved[2]])
    set_rng_state(state)
    assert torch.equal(two, expected)


def test_parts_of_a_rank_that_the_step_lacks_or_has_besides_are_named(
    opened: SyncStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(1)
    TrainingState(model=model, sampler=3, per_rank=["sampler"], rng=False).save(opened, 1)
    for other, why in [
        (TrainingState(model=model), r"only in the step: 'ranks/0/sampler'\."),
        (TrainingState(model=model, loader=1, sampler=2, per_rank=["loader", "sampler"]), "missing .*'ranks/0/loader'"),
        (
            TrainingState(model=model, loader=1, per_rank=["loader"]),
            "missing .*/loader'; only in the step: .*/sampler'",
        ),
    ]:
        with pytest.raises(Invalid, match=why):
            other.restore(opened)
    assert "rng=False" not in caplog.text
    state = TrainingState(model=model, sampler=0, per_rank=["sampler"])
    assert state.restore(opened) == 1
    assert state["sampler"] == 3
    assert "step 1 was saved with rng=False" in caplog.text


def test_parts_that_cannot_be_saved_or_loaded_are_named(opened: SyncStore) -> None:
    class Broken:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    with pytest.raises(Invalid, match=r"part 'loader'.*StatefulDataLoader"):
        TrainingState(loader=torch.utils.data.DataLoader([1, 2]))
    with pytest.raises(Invalid, match="'about'"):
        TrainingState(about=1)
    for per_rank in ("model", "other"):
        with pytest.raises(Invalid, match=f"per_rank: '{per_rank}'"):
            TrainingState(model=model_of(1), per_rank=[per_rank])
    stranger = torch.optim.SGD(model_of(1).parameters())
    with pytest.raises(Invalid, match=r"part 'optimizer'.*no module"):
        TrainingState(model=model_of(1), optimizer=stranger)
    with pytest.raises(Invalid, match=r"'odd'.*object"):
        TrainingState(odd=object()).save(opened, 1)
    TrainingState(broken=Broken()).save(opened, 1)
    with pytest.raises(Invalid, match="part 'broken' could not load its state: 'b'"):
        TrainingState(broken=Broken()).restore(opened)


# -- lazily -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_lazy_save_beside_training_is_the_state_at_its_call(opened: SyncStore, fused: bool) -> None:
    """Forward passes change BatchNorm, and fused steps change weights without counting it."""
    model = model_of(1, width=2000)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    train(model, optimizer)
    state = TrainingState(model=model, optimizer=optimizer, rng=False)
    for step in (1, 2, 3):
        expected = bits(model, optimizer)
        checkpoint = state.save(opened, step, capture="lazy")
        train(model, optimizer, steps=1)
        assert bits(model, optimizer) != expected
        checkpoint.reached("disk")
        other = model_of(2, width=2000)
        again = torch.optim.AdamW(other.parameters(), fused=fused)
        assert TrainingState(model=other, optimizer=again, rng=False).restore(opened, resume=False) == step
        assert bits(other, again) == expected
