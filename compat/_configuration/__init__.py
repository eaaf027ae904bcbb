"""The arguments of the calls, and the choice of backend and GPUs by them."""
