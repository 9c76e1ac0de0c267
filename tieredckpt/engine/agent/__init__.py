"""The trainer's side of an agent: the process that promotes on behalf of a trainer and outlives it.

`client` talks to it over a socket in the RAM tier's folder, `supervisor` starts it, `wire` carries `messages`,
`deltas` is what each side knows of the other's tiers. What a trainer beside an agent does otherwise is in
`tieredckpt.engine.mode.beside_agent`; the agent's own side is `tieredckpt.agent`.
"""
