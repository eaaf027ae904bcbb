import os

# Most of the time that these tests take is compiling.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
