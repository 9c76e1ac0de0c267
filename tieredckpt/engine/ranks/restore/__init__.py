"""A restore by many ranks: `rendezvous` brings them together, `plan` says who reads what, `transfer` sends it on."""
