"""A restore by many ranks: `rendezvous` starts it, `plan` assigns chunks to ranks, `transfer` sends them."""
