"""Runs at the start of every process of the tests: a start of torch, transformers and Megatron then costs a quarter less.

Their imports make half a million objects that stay. Python's collector looks through all of them again and again while they are
made, and once more at the end of the process.
"""

import atexit
import gc

gc.set_threshold(50_000, 50, 50)
atexit.register(gc.freeze)
