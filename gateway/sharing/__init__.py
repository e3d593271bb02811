"""Fleet state shared between gateways through Redis.

Each gateway decides from its own FleetState, in memory. Beside that it publishes what it did (wire.py) on one Redis
stream a fleet, and applies what the others publish (book.py) as if it had done it itself. Nothing in a decision waits
for Redis: what comes late is late, and what does not come leaves each gateway with its own knowledge (hub.py).
"""
