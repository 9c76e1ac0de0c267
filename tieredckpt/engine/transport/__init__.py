"""Communicators over the engines that a training has anyway, each in a module of its own.

`mailbox` is the protocol of those that can only store small values for each other; `shared`, `torch` and `jax`
carry its messages. `mpi` speaks MPI itself, `auto` finds out which one to take.
"""
