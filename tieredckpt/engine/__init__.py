"""The engine: saves, promotions, restores, repairs and evictions, on an event loop of their own.

`engine` composes the parts and owns their life, `loop` is the way in from other loops and threads, `admin` does what
a person asks for by hand. The folders, from the lowest to the highest, each of which imports downwards only: `tier`,
`state`, `opening`, `keeping`, `restoring`, `promoting`, `repairing`, `saving`, `ranks`, `transport`, `agent`,
`exporting`, `mode`.
docs/explanation/architecture.md draws the map.
"""
