"""The commit of a step of many ranks: `vote` is the prepare phase, `commit` writes the merged step, or aborts.

In the vote, `attempts` names the saves of a rank, `ballot_box` keeps what has come to rank 0, and `coordinator` decides
there. `parts` converts between indexes and the files of parts, `merged` keeps merged steps between the two phases.
"""
