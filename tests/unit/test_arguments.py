"""What callers give is taken, or refused by name before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scenes import config, folder, ram

from tieredckpt import CheckpointStore, SyncStore
from tieredckpt.errors import Invalid, NotFound


@pytest.fixture
def tiers(shared_memory: Path, tmp_path: Path) -> dict[str, Any]:
    return {"ram": ram(shared_memory), "disk": folder(tmp_path / "disk", retain="all")}


@pytest.fixture
def store(tiers: dict[str, Any]) -> Iterator[SyncStore]:
    with CheckpointStore.open(config(tiers)).sync() as store:
        yield store


TREE = {"w": np.arange(10.0)}


@pytest.mark.parametrize("capture", ["copy", "reference"])
@pytest.mark.parametrize(
    "value",
    [None, "x", "0.5", b"1", np.ones(3), np.ones(1), np.array("x"), 10**400, 1j, {}, [1.0], ..., "\ud800"],
    ids=ascii,
)
def test_a_metric_that_is_no_number_is_named_and_nothing_is_saved(store: SyncStore, value: Any, capture: Any) -> None:
    with pytest.raises(Invalid, match="the metric 'loss'"):
        store.save(1, {"epoch": 1}, metrics={"accuracy": 0.5, "loss": value}, capture=capture)
    assert store.steps() == ()
    store.save(1, TREE, metrics={"loss": 1.0})


def test_there_is_nothing_to_restore_from_an_empty_store_not_even_a_lossy_copy(store: SyncStore) -> None:
    assert store.restore() is store.restore(lossy=True) is None
    with pytest.raises(Invalid, match="give `like` or `into`, not both"):
        store.restore(like=TREE, into=TREE)


def test_a_cast_needs_a_tree_that_says_to_which_dtypes(store: SyncStore) -> None:
    store.save(1, {"w": np.arange(10.0), "b": np.arange(3)})
    for arguments in ({}, {"into": {"w": np.zeros(10, np.float32), "b": np.zeros(3, int)}}, {"as_": "saved"}):
        with pytest.raises(Invalid, match="cast=True converts arrays to the dtypes of `like`"):
            store.restore(cast=True, **arguments)
    like = {"w": np.zeros(10, np.float16), "b": np.zeros(3, int)}
    with pytest.raises(Invalid, match=r"'w' \(like: float16\[10\], step: float64\[10\]; cast=True"):
        store.restore(like=like)
    for copy in (True, False):
        found = store.restore(like=like, cast=True, copy=copy)
        assert found is not None
        assert {key: array.dtype for key, array in found.tree.items()} == {"w": np.float16, "b": int}
        assert found.tree["w"].tolist() == list(range(10))


def test_a_tree_that_does_not_fit_is_called_as_the_caller_did_and_the_step_is_named(store: SyncStore) -> None:
    store.save(7, {"w": np.zeros(10)})
    for said in ("like", "into"):
        with pytest.raises(
            Invalid, match=rf"^`{said}` does not fit step 7 .*'w' \({said}: float64\[9\], step: .*`{said}`"
        ):
            store.restore(**{said: {"w": np.zeros(9)}})
        with pytest.raises(Invalid, match=f"^`{said}` does not fit step 7 .*: it is one float64.*, the step one dict"):
            store.restore(**{said: np.zeros(10)})


def test_keys_that_choose_nothing_name_the_step(store: SyncStore) -> None:
    store.save(7, {"weights": np.zeros(10)})
    with pytest.raises(NotFound, match=r"step 7 \(serial 1\) has no leaf that matches 'weight'; near: 'weights'"):
        store.restore(keys=["weight"])


@pytest.mark.parametrize("name", [1, None, b"loss", ("loss",), "\ud800"], ids=ascii)
def test_a_metric_whose_name_is_no_text_is_refused(store: SyncStore, name: Any) -> None:
    with pytest.raises(Invalid, match="the metric"):
        store.save(1, TREE, metrics={name: 1.0})
    assert store.steps() == ()


@pytest.mark.parametrize("metrics", ["loss", ["loss"], 5, [("loss", 1.0)]], ids=repr)
def test_metrics_that_are_no_mapping_are_refused(store: SyncStore, metrics: Any) -> None:
    with pytest.raises(Invalid, match="metrics are numbers by name"):
        store.save(1, TREE, metrics=metrics)


def test_metrics_come_back_as_given_by_this_process_and_the_next(tiers: dict[str, Any]) -> None:
    given = {"": 1, "ä/b c\n": np.float32(0.5), np.str_("count"): np.int64(3), "on": True, "0-d": np.array(2.5)}
    given |= {"nan": np.nan, "inf": -np.inf, "tiny": 5e-324, "zero": -0.0, "10": 2**60}
    expected = {str(name): float(value) for name, value in given.items()}
    for _ in range(2):
        with CheckpointStore.open(config(tiers)).sync() as store:
            if not store.steps():
                store.save(1, TREE, metrics=given)
            restored = store.restore()
            assert restored is not None
            for found in (restored.metrics, store.steps()[0].metrics, store.describe(1).info.metrics):
                assert list(found) == list(expected)
                assert repr(dict(found)) == repr(expected)


@pytest.mark.parametrize("framework", ["torch", "jax.numpy"])
def test_a_loss_is_given_as_the_framework_has_it(store: SyncStore, framework: str) -> None:
    numbers = pytest.importorskip(framework)
    loss = numbers.ones((3,)).sum() if framework == "torch" else numbers.ones(3).sum()
    store.save(1, TREE, metrics={"loss": loss})
    assert store.steps()[0].metrics == {"loss": 3.0}
    with pytest.raises(Invalid, match="the metric 'loss'"):
        store.save(2, TREE, metrics={"loss": numbers.ones((3,))})


@pytest.mark.filterwarnings("error")
def test_a_loss_that_has_a_gradient_is_given_without_a_warning(store: SyncStore) -> None:
    loss = pytest.importorskip("torch").ones((), requires_grad=True) * 3
    for capture in ("copy", "lazy"):
        store.save(1, TREE, metrics={"loss": loss}, capture=capture, overwrite=True)
        store.flush()
    assert store.steps()[0].metrics == {"loss": 3.0}


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, int], ids=lambda kind: kind.__name__)
def test_any_integer_is_a_step(store: SyncStore, kind: Callable[[int], Any]) -> None:
    step = kind(7)
    assert store.due(step)
    assert type(store.save(step, TREE).step) is int
    store.flush()
    restored = store.restore(step)
    assert restored is not None
    assert (type(restored.step), restored.step) == (int, 7)
    assert store.describe(step).info.step == 7
    assert store.where(step) == ("ram", "disk")
    assert len(store.verify(step)) == 2
    assert store.promote(step, "disk") == 0
    assert json.dumps(store.spec(step, "w"))
    store.evict(step, "ram")
    assert store.where(7) == ("disk",)


@pytest.mark.parametrize("step", [True, np.True_, 1.0, np.float64(1), "1", -1, np.int64(-1)], ids=repr)
def test_what_is_no_step_is_refused_by_every_call(store: SyncStore, step: Any) -> None:
    store.save(1, TREE)
    for call in (
        lambda: store.save(step, TREE, overwrite=True),
        lambda: store.due(step),
        lambda: store.restore(step),
        lambda: store.describe(step),
        lambda: store.where(step),
        lambda: store.verify(step),
        lambda: store.promote(step, "disk"),
        lambda: store.evict(step, "ram"),
        lambda: store.spec(step, "w"),
    ):
        with pytest.raises(Invalid, match="a step is a whole number"):
            call()


@pytest.mark.parametrize("keys", [[None], ["w", None], [1], [b"w"], "w", 5, []], ids=repr)
def test_keys_that_are_no_patterns_are_refused(store: SyncStore, keys: Any) -> None:
    store.save(1, TREE)
    for call in (lambda: store.restore(keys=keys), lambda: store.describe(keys=keys)):
        with pytest.raises(Invalid, match="keys"):
            call()
    if keys:
        with pytest.raises(Invalid, match="replicated"):
            store.save(2, TREE, replicated=keys)


@pytest.mark.parametrize("tier", [None, 5, b"ram", ["ram"]], ids=repr)
def test_what_is_no_name_of_a_tier_is_refused(store: SyncStore, tier: Any) -> None:
    saved = store.save(1, TREE)
    for call in (saved.reached, lambda tier: store.promote(1, tier), lambda tier: store.evict(1, tier)):
        with pytest.raises(Invalid, match="a tier is given by its name"):
            call(tier)


def test_an_array_of_strings_of_any_length_is_named(store: SyncStore) -> None:
    words = np.array(["a", "b"], dtype=np.dtypes.StringDType())
    with pytest.raises(Invalid, match="'names/0'"):
        store.save(1, {"names": [words]})
    store.save(1, TREE)
    with pytest.raises(Invalid, match="'w'"):
        store.restore(into={"w": words})


@pytest.mark.parametrize("rows", [1, 30_000])
@pytest.mark.parametrize("made", [lambda array: array, lambda array: array[:, ::2], np.asfortranarray])
def test_a_bool_of_any_byte_is_restored_as_a_bool_and_opened_by_stock_tensorstore(
    store: SyncStore, rows: int, made: Callable[[Any], Any]
) -> None:
    import tensorstore as ts

    bytes_of_any_value = np.random.default_rng(0).integers(0, 3, (rows, 4), np.uint8)
    mask = made(bytes_of_any_value.view(bool))
    store.save(1, {"mask": mask})
    restored = store.restore()
    assert restored is not None
    bits = (made(bytes_of_any_value) != 0).astype(np.uint8)
    assert np.array_equal(restored.tree["mask"].view(np.uint8), bits)
    assert np.array_equal(bytes_of_any_value.view(bool).view(np.uint8), bytes_of_any_value)  # the caller's is as it was
    store.flush()
    opened = ts.open(store.spec(1, "mask", "disk")).result()
    assert np.array_equal(opened.read().result().view(np.uint8), bits)
