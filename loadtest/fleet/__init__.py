"""Real gateways in front of a fake fleet: the same trace through ours and through others' binaries, in real time.

The replicas are fake in one thing only, the GPU: each runs the engine's real scheduler and block pool (the simulator's
Engine), takes for a step the time that the service model says, and speaks OpenAI's API, vLLM's metrics and vLLM's KV
events over real sockets. Everything in front of them is real: processes, HTTP, tokenizing, polling.

Time is the trace's, sped up: a step of 20 ms takes 5 ms of the wall's clock at --speedup 4, and every figure is given
in the trace's seconds. What a gateway itself costs is not sped up, so a millisecond of it counts as four; and whatever
has a fixed period in it (polls, evictions) comes as rarely as the speed-up says.

Text is smaller than the trace's by --compress (text.py): one word stands for so many tokens, for everybody alike. A
gateway sees a model whose tokens are as many times fewer and dearer. Ratios (matched share, load) stay what they are;
a rule with a number of tokens in it means more of them. `--compress 1` is the trace as it is, at its real size.
"""
