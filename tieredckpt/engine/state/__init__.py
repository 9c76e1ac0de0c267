"""The state that all of the engine shares: tiers, step table, branch, membership, observation.

In: what the other folders learn. Out: `State` and `DerivedState`, and the parts that some get alone: `StepTable`,
`Branch`, `Membership`, `Observation`, `RamGate`, `FailureHistory`. `adoption` chooses the branch that a process
continues, `promotions` counts and reports promotions, `views` makes what policies see. Does no I/O of its own.
"""
