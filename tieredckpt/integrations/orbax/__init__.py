"""`CheckpointManager`: the calls of ``orbax.checkpoint.CheckpointManager``, over a store.

::

    from tieredckpt.integrations.orbax import CheckpointManager     # instead of orbax.checkpoint's

    manager = CheckpointManager("/ckpt/run", options=ocp.CheckpointManagerOptions(max_to_keep=3))
    manager.save(step, args=ocp.args.StandardSave(state))
    state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))

Arguments and options are Orbax's own classes. It replaces the manager, not a handler behind it: a handler writes files
to a given folder, without RAM, tiers and policies. `manager` has the calls, `items` maps arguments to saved values,
`targets` restores into a caller's tree, and `options` translates the policies.
"""

from __future__ import annotations

from orbax.checkpoint import CheckpointManagerOptions, args

from tieredckpt.integrations.orbax.manager import CheckpointManager

__all__ = ["CheckpointManager", "CheckpointManagerOptions", "args"]
