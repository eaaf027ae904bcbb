"""One module per backend; the directory itself is the registry (see ``compat._registry``)."""
