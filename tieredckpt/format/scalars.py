"""Inline scalars of a structure: the node of a Python value, and the value of a node."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tieredckpt.errors import Invalid
from tieredckpt.format.structure import (
    MAX_INLINE_BYTES,
    MAX_JSON_INT,
    BoolNode,
    BytesNode,
    ComplexNode,
    FloatNode,
    IntNode,
    NoneNode,
    ScalarNode,
    StrNode,
)

__all__ = ["scalar_node", "scalar_value"]


def scalar_node(key: str, value: object) -> ScalarNode | None:
    """``value`` as an inline scalar: an int, float, complex, bool, str, bytes or None; else None.

    Subclasses are not scalars: they would come back as the base class. Raises `Invalid`, naming ``key``, for a str that
    UTF-8 cannot hold and for one larger than `MAX_INLINE_BYTES`.
    """
    make = _SCALARS.get(type(value))
    return None if make is None else make(key, value)


def scalar_value(node: ScalarNode) -> int | float | complex | bool | str | bytes | None:
    """The Python scalar that ``node`` holds."""
    match node:
        case IntNode(value=str(digits)):
            return int(digits, 16)
        case FloatNode(bits=bits):
            return _from_bits(bits)
        case ComplexNode(real=real, imag=imag):
            return complex(_from_bits(real), _from_bits(imag))
        case NoneNode():
            return None
        case _:
            return node.value


def _int_node(key: str, value: int) -> IntNode:
    if -MAX_JSON_INT <= value <= MAX_JSON_INT:
        return IntNode(value)
    if value.bit_length() > 8 * MAX_INLINE_BYTES:
        raise _too_large(key, "int", (value.bit_length() + 7) // 8)
    # Hexadecimal: the interpreter limits decimal conversion to some thousand digits.
    return IntNode(hex(value))


def _str_node(key: str, value: str) -> StrNode:
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise Invalid(
            f"leaf {key!r}: the str holds a lone surrogate, which UTF-8 cannot; store bytes (os.fsencode)"
        ) from error
    if size > MAX_INLINE_BYTES:
        raise _too_large(key, "str", size)
    return StrNode(value)


def _bytes_node(key: str, value: bytes) -> BytesNode:
    if len(value) > MAX_INLINE_BYTES:
        raise _too_large(key, "bytes", len(value))
    return BytesNode(value)


def _too_large(key: str, what: str, size: int) -> Invalid:
    return Invalid(
        f"leaf {key!r}: {what} of {size} bytes exceeds the limit of {MAX_INLINE_BYTES} for inline values; "
        f"store it as a uint8 array (np.frombuffer)"
    )


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _from_bits(bits: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


_SCALARS: dict[type, Callable[[str, Any], ScalarNode]] = {
    int: _int_node,
    float: lambda key, value: FloatNode(_bits(value)),
    complex: lambda key, value: ComplexNode(_bits(value.real), _bits(value.imag)),
    bool: lambda key, value: BoolNode(value),
    str: _str_node,
    bytes: _bytes_node,
    type(None): lambda key, value: NoneNode(),
}
