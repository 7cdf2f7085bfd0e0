"""The parts of `benchmarks/compare.py`.

`points` says what is measured, `team` starts ranks and asks them to run, `rank` is what runs in them, `case` is what a
contender is given, `ours`, `torch_only` and `peers` are the contenders, and `tables` makes text of it all.
"""
