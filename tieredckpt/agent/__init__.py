"""The agent: a process of the node that promotes on behalf of a trainer, and goes on when that dies.

The trainer alone writes to RAM, the agent alone to all slower tiers. `agent` is its life, and the way in for the
command line, `service` what it does when a trainer asks. The trainer's side is `tieredckpt.engine.agent`.
"""
