"""The commit of a step of many ranks: `vote` is the prepare phase, `commit` writes the merged step, or aborts."""
