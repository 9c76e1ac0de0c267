"""The state that the rooms share: tiers, step table, branch, membership, observation.

In: what other rooms learn. Out: `State` and `DerivedState`, and the parts that a room gets alone: `StepTable`,
`Branch`, `Membership`, `Observation`, `RamGate`, `FailureHistory`. `adoption` chooses the branch that a process
continues, `promotions` counts and reports promotions, `views` makes what policies see. Does no I/O of its own.
"""
