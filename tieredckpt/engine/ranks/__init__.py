"""Many ranks: one step of all of them, by two-phase commit with rank 0 as the coordinator.

In: a `Communicator`. Out: steps that all ranks have or none. `group` sends and receives messages, `open` opens
together, `ranked` is a rank's part in everything else. `commit` votes, `restore` restores together, `replicas` keeps
copies of parts on other nodes.
"""
