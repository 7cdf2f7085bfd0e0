"""`torchrun … -m ringspan.serve MODEL …` is `ringspan serve MODEL …` on each of its ranks."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    runpy.run_module("ringspan", run_name="__main__")
