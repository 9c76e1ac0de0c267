"""CHFS as a blob store: libchfs in a worker process (`worker`), and the store in this one (`store`).

Nothing is imported here, since the worker loads this package too. See docs/decisions/0008-chfs.md.
"""
