"""One package per backend; the folder itself is the registry (see ``compat._registry``)."""
