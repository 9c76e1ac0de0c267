"""`CheckpointManager`: the calls of ``orbax.checkpoint.CheckpointManager``, over a store.

::

    from tieredckpt.integrations.orbax import CheckpointManager     # instead of orbax.checkpoint's

    manager = CheckpointManager("/ckpt/run", options=ocp.CheckpointManagerOptions(max_to_keep=3))
    manager.save(step, args=ocp.args.StandardSave(state))
    state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))

Arguments and options are Orbax's own classes. It takes the place of the manager, not of a handler behind it: a handler
is given a folder to write files to, and would have no RAM, no tiers and no policies. `manager` has the calls, `items`
what is saved for which arguments, `targets` the restore into a caller's tree, `options` the policies.
"""

from __future__ import annotations

from orbax.checkpoint import CheckpointManagerOptions, args

from tieredckpt.integrations.orbax.manager import CheckpointManager

__all__ = ["CheckpointManager", "CheckpointManagerOptions", "args"]
