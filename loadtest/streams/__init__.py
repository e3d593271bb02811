"""What many clients cost that do nothing, or next to nothing, and whether memory stays where it is.

    idle    10,000 streams that have had their first token and wait: the gateway's memory for each, and how late its
            event loop runs meanwhile
    slow    1,000 clients that read one byte a second: the waits of others with them and without, in alternation, since
            a machine's own moods are larger than the difference
    memory  resident memory after a tenth of the requests, and after all of them

The gateway is a process of its own, its workers are scripted ones. Linux, through /proc.
"""
