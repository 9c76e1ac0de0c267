"""The agent: a process of the node that promotes on behalf of a trainer, and continues after the trainer's death.

Only the trainer writes to RAM, and only the agent writes to slower tiers. `agent` is the agent's life and the entry for
the command line, `service` serves the requests of a trainer. The trainer's side is `tieredckpt.engine.agent`.
"""
