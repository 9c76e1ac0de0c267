"""How a process takes part in a store: alone, as a reader, as one rank of several, or beside an agent.

In: the state. Out: one object, made when the store opens, that the engine calls instead of asking which mode it is in.
`alone` says what there is to do and does it for one process; `among_ranks` and `beside_agent` override what differs,
also of the verbs for people and of the tiers for a save that RAM cannot hold.
"""
