"""`warmgate up`: a gateway and its workers on one machine, started, watched, restarted and stopped together.

plan.py       options -> the commands and environment of every child (cores and memory shared out)
preflight.py  what would fail later, found before anything starts: ports, model, packages
machine.py    what to do when: a state machine without I/O (events in, actions out)
process.py    one child: its own process group, its output, its death with ours
probe.py      asks a child over HTTP how far it is
screen.py     progress on a terminal or as plain lines, and the lines that show how to call it
run.py        the driver: turns processes and HTTP into the machine's events, and its actions into signals
"""
