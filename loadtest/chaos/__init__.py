"""Chaos: everything fails on a seeded schedule under mixed traffic, and every token is checked.

Theory. A proxy's worst faults are silent: a stream that lacks a token, has one twice or mixes two answers, and calls
itself complete. They can't be seen in rates of errors, so here the truth about each answer is known beforehand, and
every byte that a client got is held against it:

    workers   three, each behind a link that can be slow, narrow, cut or reset (loadtest/toxic.py). Fake ones number
              their tokens and tag them with the request's name; real engines answer prompts whose greedy answers were
              taken down before the trouble began
    gateways  two `warmgate serve`, which share a Redis. All of them are processes and are killed as such
    clients   streaming or not, chats or plain completions, short or long, and some that leave, read slowly or lose
              patience and ask again

Each request of a client is a try, and ends in exactly one way (verdict.Ending). What is held against the gateway: a
success that isn't the truth, an error after tokens that are not the beginning of the truth, an end that is none (a
stream that just stops, a silence), and whatever its own log says otherwise. What isn't: a connection lost while the
gateway process at its other end had been killed. Nobody could do better for that client than the other gateway does.

The schedule (schedule.py) and the requests (asks.py) follow from --seed alone, so a run that fails can be had again,
as far as the machine's timing allows. Never more than one of the three workers is killed or stopped at once, and one
more may be behind a bad link; the gateways take turns.
"""
