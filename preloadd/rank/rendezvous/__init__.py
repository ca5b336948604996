"""A rank among the ranks of its group on all hosts, by the rules of `protocol.rendezvous`.

Every rank has a `presence`. Rank 0's has a `hall`, where the others come to its `port`; theirs
connect to it. `hearing` is what both sides do with a connection.
"""
