"""CHFS as a blob store: a worker process hosts libchfs (`worker`), and this process has the store (`store`).

Nothing is imported here, since the worker loads this package too. See docs/decisions/0008-chfs.md.
"""
