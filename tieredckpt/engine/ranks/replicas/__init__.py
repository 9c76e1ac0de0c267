"""Replicas of the ranks' parts: `placement` chooses the nodes, `ledger` knows what copies are due, `replication` has
them made.
"""
