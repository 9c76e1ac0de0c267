"""Removes credentials from what people and files get: settings, URLs, messages.

A secret is known by the name of the member, header or parameter that holds it, or by its place in a URL: the user
information, and every value of the query, which is where signed URLs have their signature.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["REDACTED", "is_redacted", "redacted", "redacted_text", "secrets_of", "without_secrets"]

REDACTED = "REDACTED"
"""Replacement text of a secret."""

_PARTS = re.compile(
    r"secret|passw|passphrase|credential|authorization|signature|bearer|cookie|(?:api|access|account|private)key|token$"
)
_WORDS = frozenset({"auth", "header", "headers", "key", "pwd", "sas", "sig", "token"})

_USER = re.compile(r"(?<=://)[^\s/?#\"'<>]*@")
_QUERY = re.compile(r"(://[^\s?#\"'<>]*)\?[^\s\"'<>]*")
_HEADER = re.compile(r"(([\w-]+):\s+).+", re.DOTALL)
_QUOTED = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''
_MEMBER = re.compile(rf"([\"'])([\w.-]+)\1(\s*[:=]\s*)(?:{_QUOTED}|\[[^\]]*\]|\{{[^}}]*\}})")
_PARAMETER = re.compile(
    rf"(?<![\w\"'.-])([\w.-]+)(\s*[:=]\s*)(?:(?:Bearer|Basic|Token|ApiKey|Digest|Negotiate)\s+)?"
    rf"(?:{_QUOTED}|[^\s\"',;&}}\])]+)",
    re.IGNORECASE,
)

_SHORTEST = 4
"""Characters of a secret that is looked for in a text by its value; a shorter one would match anything."""


def redacted(value: Any) -> Any:
    """``value``, made of what JSON has, with `REDACTED` for every secret; other objects stay as they are."""
    if isinstance(value, str):
        header = _HEADER.fullmatch(value)
        return f"{header[1]}{REDACTED}" if header and _is_secret(header[2]) else _in_urls(value)
    if isinstance(value, Mapping):
        return {name: REDACTED if _holds_a_secret(name, member) else redacted(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return value


def without_secrets(value: Any) -> Any:
    """Remove secrets, where `redacted` replaces them."""
    if isinstance(value, str):
        return _QUERY.sub(r"\1", _USER.sub("", value))
    if isinstance(value, Mapping):
        return {name: without_secrets(member) for name, member in value.items() if not _holds_a_secret(name, member)}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return value


def redacted_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """A message with `REDACTED` for every secret, and for each of ``secrets``."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _MEMBER.sub(_without_member, _in_urls(text))
    return _PARAMETER.sub(_without_parameter, text)


def secrets_of(value: Any) -> tuple[str, ...]:
    """The secrets in ``value``, the longest first, for `redacted_text`: they may come back in a foreign message."""
    found = set(_secrets(value, secret=False))
    escaped = {json.dumps(secret)[1:-1] for secret in found}
    return tuple(sorted((secret for secret in found | escaped if len(secret) >= _SHORTEST), key=len, reverse=True))


def is_redacted(value: Any) -> bool:
    """Whether `redacted` has taken a secret out of ``value``."""
    if isinstance(value, Mapping):
        return any(map(is_redacted, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_redacted, value))
    return isinstance(value, str) and REDACTED in value


def _secrets(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from _secrets(member, secret=secret or _is_secret(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, secret=secret)
    elif isinstance(value, str):
        if secret:
            # Of a header, "Authorization: Bearer VALUE", also what the server may repeat of it.
            yield from (value, value.partition(":")[2].strip(), value.split()[-1] if value.split() else value)
        for user in _USER.findall(value):
            yield from user[:-1].split(":", 1)
        for query in _QUERY.finditer(value):
            yield from (item.partition("=")[2] for item in query.group().partition("?")[2].split("&"))


def _holds_a_secret(name: object, member: object) -> bool:
    return _is_secret(name) and member not in (None, "", [], {})


def _is_secret(name: object) -> bool:
    """Whether a member, header or parameter of this name holds a secret: ``aws_secret_key``, ``X-Amz-Signature``."""
    if not isinstance(name, str):
        return False
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    return words[:2] == ["x", "amz"] or any(word in _WORDS or _PARTS.search(word) for word in words)


def _in_urls(text: str) -> str:
    return _QUERY.sub(rf"\1?{REDACTED}", _USER.sub(f"{REDACTED}@", text))


def _without_member(found: re.Match[str]) -> str:
    quote, name, between = found.groups()
    return f"{quote}{name}{quote}{between}{quote}{REDACTED}{quote}" if _is_secret(name) else found.group()


def _without_parameter(found: re.Match[str]) -> str:
    name, between = found.groups()
    return f"{name}{between}{REDACTED}" if _is_secret(name) else found.group()
