"""The planner: what a model needs on given hardware, from its shapes alone, without torch and without a GPU.

Units are in every name: GB is 1e9 bytes, GiB is 2^30. ``shapes`` (parameters) stands lowest, then ``hardware``,
``training`` and ``serving`` (memory of a rank), ``steps`` (time), ``suggest`` (search), ``report`` (the whole).
"""
