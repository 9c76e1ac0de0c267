"""Opening a store: which store the tiers hold, whose RAM is used, and what each tier has.

In: a configuration. Out: tiers that are connected, identified and scanned. `connect` opens one tier, `markers` tells
which store it belongs to, `identify` decides which store all belong to, `ram_choice` decides whose RAM it is, `ram`
opens it, `scan` lists a tier, `catalog_write` shortens the next opening.
"""
