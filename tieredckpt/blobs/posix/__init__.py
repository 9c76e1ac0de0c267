"""A blob store over a directory: `store`, its names and durable folders (`paths`), its I/O (`transfer`)."""
