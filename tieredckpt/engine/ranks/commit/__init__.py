"""The commit of a step of many ranks: `vote` is the prepare phase, `commit` writes the merged step, or aborts.

`parts` converts between indexes and the files of parts, `merged` keeps merged steps between the two phases.
"""
