"""What a comparison of engines (loadtest/engine_bench.py) needs of torch: the machine's limits, and a peer."""
