"""Device work as awaitables: streams on a CPU thread, on CUDA, or made of a cost model."""
