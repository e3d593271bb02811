"""Who may ask, for what and how much: keys, limits, salts and the ledger of what was used.

keys.py       a key, its digest and its record; the tenants' own limits
store.py      where records are kept: a file or Redis
salt.py       what keeps one tenant's prefixes apart from another's
limits.py     the machine that admits or refuses, without I/O
shared.py     the same decision for several gateways at once, in Redis
service.py    what the proxy asks: who is it, may it, what did it use
"""
