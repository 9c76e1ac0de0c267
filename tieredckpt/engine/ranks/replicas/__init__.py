"""Replicas of the ranks' parts: `placement` chooses the nodes, `replication` keeps the copies that are due."""
