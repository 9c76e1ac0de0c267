"""Opening a store: which store the tiers hold, whose RAM is used, and what each tier has.

In: a configuration. Out: tiers that are connected, identified and scanned. `connect` and `identity` find the store,
`ram_choice` decides whose RAM it is, `ram` opens it, `scan` lists a tier, `catalog_write` shortens the next opening.
"""
