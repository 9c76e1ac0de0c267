"""What the rooms share: the tiers, the step table, the branch that the training continues, observations.

In: what other rooms learn. Out: `State`, `StepTable`, `Branch`, `FailureHistory`. Does no I/O of its own.
"""
