"""The agent: a process of the node that promotes on behalf of a trainer, and goes on when that dies.

The trainer alone writes to RAM, the agent alone to all slower tiers. `agent` is its life, `service` what it does when
a trainer asks, `run` the way in for the command line. The trainer's side is `tieredckpt.engine.agent`.
"""
