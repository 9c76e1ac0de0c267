"""The agent: a process that promotes on behalf of a trainer, and goes on when that dies.

The trainer alone writes to RAM (`link` is its side, `by_agent` what it asks for by hand); the agent alone writes to
all slower tiers (`agent` is its life, `orders` what it does when asked). They talk over a socket in the RAM tier's
folder: `wire` carries `messages`, `told` is what each knows of the other's tiers, and `process` starts agents.
"""

from __future__ import annotations
