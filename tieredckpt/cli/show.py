"""The verb `show`: prints one step in full, except the values of its arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer

from tieredckpt.cli.console import metrics_text, print_json, print_table, when
from tieredckpt.cli.ls import pinned_on, state_of, tiers_of
from tieredckpt.cli.opening import Json, Step, StorePath, reading
from tieredckpt.engine.inventory import Pin, StepDetails
from tieredckpt.format import layout
from tieredckpt.format.derivation import Derivation, Rounded
from tieredckpt.units import format_size

__all__ = ["Serial", "brief", "shape_text", "show"]

Serial = Annotated[
    int | None,
    typer.Option(help="Which save, where the step was saved on several branches.", show_default=False),
]

_SHOWN = 60
"""Characters of a scalar that are shown."""


def show(store: StorePath, step: Step = None, serial: Serial = None, as_json: Json = False) -> None:
    """Show one step: where it comes from, its metrics and policy, and its tree with dtypes and shapes."""
    with reading(store) as opened:
        details, pins = opened.describe(step, serial=serial), opened.pins()
    if as_json:
        told = asdict(details)
        told["derived"] = msgspec.to_builtins(details.derived)
        told["pinned"] = pinned_on(details.info, pins)
        print_json({**told.pop("info"), "saved": when(details.info.saved_at), **told})
        return
    print_table(f"step {details.info.step}", ("", ""), list(_facts(details, pins)))
    print_table("policy", ("", ""), list(_policy(details.policy)))
    print_table(
        "arrays",
        ("key", "dtype", "shape", "size", "chunks", "kind"),
        [
            (array.key, array.dtype, shape_text(array.shape), format_size(array.nbytes), array.chunks, array.kind)
            for array in details.arrays
        ],
        right=("size", "chunks"),
    )
    for tier, how in details.derived.items():
        rows = [(layout.array_key(key), *_loss(how, array)) for key, array in how.arrays.items()]
        rows += [(key, "left out", "") for key in how.dropped]
        print_table(f"lossy copy on {tier}", ("key", "rule", "largest error"), rows)
    if details.scalars:
        rows = [(key, type(value).__name__, brief(value)) for key, value in details.scalars.items()]
        print_table("scalars", ("key", "type", "value"), rows)


def _loss(how: Derivation, array: Rounded) -> tuple[str, str]:
    """The rule that rounded an array, and the largest error found."""
    rule = how.rules[array.rule]
    kept = f", {array.exact_chunks} chunks as they were" if array.exact_chunks else ""
    if rule.max_error is not None:
        return f"within {rule.max_error:.3g} of each value", f"{array.worst:.3g} of a value{kept}"
    return f"within {rule.max_abs_error:.3g}", f"{array.worst:.3g}{kept}"


def _facts(details: StepDetails, pins: Sequence[Pin]) -> Iterator[tuple[str, object]]:
    info = details.info
    yield "serial", info.serial
    yield "saved", when(info.saved_at)
    yield "tiers", tiers_of(info)
    yield "state", state_of(info, pins)
    yield "size", f"{format_size(info.nbytes)} in {len(details.arrays)} arrays"
    yield "distinct chunks", format_size(details.distinct_nbytes)
    yield "metrics", metrics_text(info.metrics)
    serials = (f"{first}-{last}" if first < last else str(first) for first, last in details.line)
    yield "branch", f"serials {', '.join(serials)}"
    if info.restored_from is not None:
        yield "restored from", f"serial {info.restored_from}"
    yield "store", details.store
    yield from details.provenance.items()


def _policy(policy: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """A line for each setting, and for each tier; the record may hold anything, so its form is not trusted."""
    for name, value in policy.items():
        if name != "tiers" or not isinstance(value, list):
            yield name, _setting(value)
            continue
        for tier in value:
            if isinstance(tier, Mapping):
                settings = {key: item for key, item in tier.items() if key != "name" and item is not None}
                text = ", ".join(f"{key} {_setting(item)}" for key, item in settings.items())
                yield f"tier {tier.get('name')}", text
            else:
                yield "tier", _setting(tier)


def _setting(value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("kind"), str):
        rest = ", ".join(f"{key}={_setting(item)}" for key, item in value.items() if key != "kind")
        return f"{value['kind']}({rest})" if rest else str(value["kind"])
    return value if isinstance(value, str) else json.dumps(value)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape for people: ``1024x64``."""
    return "x".join(map(str, shape)) or "scalar"


def brief(value: object) -> str:
    """The ``repr`` of a scalar, cut off where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        assert isinstance(value, int)
        return f"an integer of {value.bit_length()} bits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
