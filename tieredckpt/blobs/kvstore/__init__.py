"""A blob store over any TensorStore key-value store: `store`, and the kind of tier that it makes (`kind`)."""
