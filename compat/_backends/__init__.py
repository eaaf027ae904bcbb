"""One package per backend; the folder is the registry (``compat._configuration.registry``)."""
