"""A blob store over a directory: `store`; its folders (`paths`, on a network `shared`, on Lustre `lustre`) and `files`;
its I/O (`transfer`, `target`) and threads (`calls`, `threads`); what it asks of the `system`.
"""
