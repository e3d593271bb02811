"""The simulator: the real policies and the real engine core under a model of time, driven by events.

    python -m loadtest.sim --trace FILE --policies warm,round_robin,pooled --replicas 8 --gpu h100 --rate 7

What is real: FleetState, policies, retry rules and request queue (policies/), scheduler, KV manager and block pool
(engine_worker/core/). What is modelled: how long a step takes (gpus.py), the network (delays), the clients (trace.py,
workload.py) and failures. What is left out: tokens' values. A prompt is its number of tokens and the ids of its full
blocks, so nothing is scaled: token budgets, partial blocks and block tables are exact, and only the naming of blocks is
a stand-in (prompts.py).

Time is a number. Nothing here reads a clock, so a seed gives the same result on every machine.
"""
