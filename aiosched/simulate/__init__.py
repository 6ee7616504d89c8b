"""``aiosched simulate``: the real scheduler on a simulated device, in virtual time.

What runs is the engine itself, with its streams, its scheduler and its prefix cache. Only the
device is made up: a step takes as long as a cost model says, which ``aiosched bench calibrate``
fits to a measured run. See docs/simulate.md.
"""
