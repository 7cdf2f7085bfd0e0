"""Settings for every test and for every process that a test starts."""

import os

# Ranks in threads and processes share two cores: more threads inside torch would only compete.
# torch reads the variable when it is imported, so it is set here, before any test imports torch.
os.environ["OMP_NUM_THREADS"] = "1"
