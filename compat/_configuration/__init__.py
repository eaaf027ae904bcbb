"""Which backend, which GPUs and which options: the arguments of the calls, and what is chosen."""
